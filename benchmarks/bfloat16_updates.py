"""How many weights training changes in float32 and in bfloat16: ``python -m benchmarks.bfloat16_updates``.

The tiny model takes five steps of AdamW. A bfloat16 weight has 8 significant bits, so an update that is smaller than
about 1/512 of the weight is rounded away. Writes ``benchmarks/results/bfloat16_updates.json``. Less than a minute.
"""

from __future__ import annotations

import warnings
from typing import Any

from benchmarks.harness import RESULTS, markdown, save

COMMAND = "python -m benchmarks.bfloat16_updates"
STEPS = 5


def share_of_changed_weights(dtype: str, learning_rate: float) -> float:
    """The share of the tiny model's weights that differ from their initial values after five steps."""
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


def main() -> None:
    """Measure both formats at two learning rates, print the table and keep it."""
    rows: list[dict[str, Any]] = [
        {"learning rate": rate, "weights": dtype, "share changed": share_of_changed_weights(dtype, rate)}
        for rate in (1e-6, 1e-4)
        for dtype in ("float32", "bfloat16")
    ]
    print(markdown([{**row, "share changed": f"{row['share changed']:.2%}"} for row in rows]))
    save(RESULTS / "bfloat16_updates.json", COMMAND, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
