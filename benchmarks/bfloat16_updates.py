"""What bfloat16 rounds away: ``python -m benchmarks.bfloat16_updates``.

A bfloat16 number has 8 significant bits. The tiny model takes five steps of AdamW, where an update that is smaller
than about 1/512 of its weight is lost. Then models in bfloat16 sample, and the log-probabilities of their tokens are
computed three times: by the rollout, by the learner, and by the learner with the same weights in float32. Writes
``benchmarks/results/bfloat16_updates.json``. About two minutes. The stored result has rows with logits in float32 too:
grpo_edu 0.3.0 had TRL's ``cast_lm_head_to_fp32``, which this version does not have.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from benchmarks.harness import RESULTS, markdown, save

COMMAND = "python -m benchmarks.bfloat16_updates"
STEPS = 5
PROMPTS, GROUP, LENGTH = 16, 8, 48


def share_of_changed_weights(dtype: str, learning_rate: float) -> float:
    """Return the share of the tiny model's weights that differ from their initial values after five steps."""
    from grpo_edu import GRPOConfig, accuracy_reward, load_policy, load_problems, train

    model, tokenizer = load_policy("tiny", dtype)
    before = [weight.detach().clone() for weight in model.parameters()]
    config = GRPOConfig(max_steps=STEPS, learning_rate=learning_rate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the trainer warns of what is measured here
        for _ in train(model, tokenizer, load_problems("basic"), accuracy_reward, config):
            pass
    changed = sum(int((old != new).sum()) for old, new in zip(before, model.parameters(), strict=True))
    return changed / sum(old.numel() for old in before)


def rounding_of_logps(name: str, data: str) -> dict[str, Any]:
    """Mean difference of a token's log-probability, in nats: sampler and learner, learner and float32."""
    import torch

    from grpo_edu import generate, load_policy, load_problems, render_prompt
    from grpo_edu.fast.packing import group_logps
    from grpo_edu.problems.templates import prompt_options

    model, tokenizer = load_policy(name, "bfloat16")
    exact = load_policy(name, "bfloat16")[0].float()
    problems = load_problems(data, "train")[:PROMPTS]
    prompts = [render_prompt(tokenizer, one.prompt, **prompt_options(one.level)) for one in problems]
    groups = {"num_generations": GROUP}
    rollout = generate(
        model, tokenizer, prompts, max_completion_length=LENGTH, generator=torch.Generator().manual_seed(0), **groups
    )
    tokens = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    with torch.no_grad():
        learner, wanted = (group_logps(policy, *tokens, **groups) for policy in (model, exact))
    drawn = rollout.completion_mask.bool()
    return {
        "model": name,
        "logits": "bfloat16",
        "tokens": int(drawn.sum()),
        "sampler and learner": (learner - rollout.sampling_per_token_logps)[drawn].abs().mean().item(),
        "learner and float32": (learner - wanted)[drawn].abs().mean().item(),
    }


def main() -> None:
    """Measure both formats, print the tables and keep them."""
    rows: list[dict[str, Any]] = [
        {"learning rate": rate, "weights": dtype, "share changed": share_of_changed_weights(dtype, rate)}
        for rate in (1e-6, 1e-4)
        for dtype in ("float32", "bfloat16")
    ]
    print(markdown([{**row, "share changed": f"{row['share changed']:.2%}"} for row in rows]))
    logps = [rounding_of_logps(name, data) for name, data in (("tiny", "basic"), ("smollm2", "instructions"))]
    print(markdown([{key: f"{x:.4f}" if isinstance(x, float) else x for key, x in row.items()} for row in logps]))
    place = RESULTS / "bfloat16_updates.json"
    stored = json.loads(place.read_text(encoding="utf-8"))["logps"]
    logps += [row for row in stored if row["logits"] == "float32"]
    save(place, COMMAND, {"steps": STEPS, "rows": rows, "logps": logps})


if __name__ == "__main__":
    main()
