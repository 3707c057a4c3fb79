"""Losses, gradients and advantages against TRL's own code on random settings: ``python -m benchmarks.parity``.

Each setting is a batch and a config with random values of every option that TRL has too. TRL's side is its
``GRPOTrainer``: its own methods compute the advantages and the loss from given rewards, log-probabilities and
entropies. Ours is `grpo_edu.trainer`, with the batch divided into up to three micro-batches. Both sides compute in
float64, and so only rounding separates them. Writes ``benchmarks/results/parity.json``. About five minutes.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, exit_code, markdown, save
from grpo_edu import GRPOConfig, accuracy_reward, load_policy, load_problems, trainer
from grpo_edu.losses import IMPORTANCE_SAMPLING_LEVELS, LOSSES, token_weights
from grpo_edu.quantization.rollouts import QuantizedSampler
from grpo_edu.rewards import combine_rewards
from grpo_edu.rollout import Sampler
from grpo_edu.scale.trl_backend import build_trainer

COMMAND = "python -m benchmarks.parity"
SETTINGS = 6000
TOLERANCE = 1e-8  # where rewards cancel each other, TRL divides their rounding errors by 1e-4
# TRL has no loss -A log π of its own: its "cispo" is that at ratio 1 without a cap, divided by what it is told to.
AS_TRL = {"reinforce": "cispo"}
COMPARED = [name for name, loss in LOSSES.items() if name in AS_TRL or loss.trl]


@dataclass
class Setting:
    """A random config, and a random batch in float64.

    rewards_per_func: (B, K), NaN if a function does not apply. loss_mask: (B, C).
    logps, old, ref, sampled: (B, C), nats; old may be None. entropies: (B, C), nats.
    token_factors: (B, C) for advantages that differ between tokens, or None. parts: rows of each micro-batch.
    """

    config: GRPOConfig
    rewards_per_func: Tensor
    loss_mask: Tensor
    logps: Tensor
    old: Tensor | None
    ref: Tensor
    sampled: Tensor
    entropies: Tensor
    token_factors: Tensor | None
    parts: list[Tensor]


def draw_config(draw: random.Random, functions: int, longest: int) -> GRPOConfig:
    """Random values of all settings that the advantages and the loss depend on."""
    loss_type = draw.choice(COMPARED)
    bounds = (None, 0.28, 0.5, 2.0) if LOSSES[loss_type].clips != "weight" else (1.0, 2.0, 5.0)
    return GRPOConfig(
        num_generations=draw.choice((2, 3, 4, 8)),
        prompts_per_step=draw.randint(1, 4),
        max_completion_length=longest + draw.randint(0, 8),
        loss_type=loss_type,
        importance_sampling_level=draw.choice(IMPORTANCE_SAMPLING_LEVELS),
        epsilon=draw.choice((0.0, 0.05, 0.2, 0.5)),
        epsilon_high=draw.choice(bounds),
        beta=draw.choice((0.0, 0.001, 0.1, 1.0)),
        use_bias_correction_kl=draw.random() < 0.5,
        entropy_coef=draw.choice((0.0, 0.0, 0.001, 0.1)),
        scale_rewards=draw.choice(("group", "batch", "none")),
        reward_weights=draw.choice((None, tuple(draw.uniform(-1, 2) for _ in range(functions)))),
        rollout_quantization=draw.choice((None, None, "int8-weight")),
        importance_sampling_clip_max=draw.choice((1.5, 3.0)),
        seed=draw.randrange(2**32),
    )


def draw_setting(draw: random.Random) -> Setting:
    """Return a random setting, with ties, missing rewards, padding, empty rows and far-off policies among them."""
    functions, longest = draw.randint(1, 3), draw.randint(1, 12)
    config = draw_config(draw, functions, longest)
    rows = config.batch_size
    numbers = torch.Generator().manual_seed(config.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers, dtype=torch.float64)

    rewards = normal(rows, functions) if draw.random() < 0.5 else normal(rows, functions).sign().clamp(min=0)
    rewards[torch.rand(rows, functions, generator=numbers) < draw.choice((0.0, 0.0, 0.2, 0.6))] = torch.nan
    lengths = torch.randint(draw.choice((0, 1)), longest + 1, (rows, 1), generator=numbers)
    lengths[0] = longest
    logps, distance = -normal(rows, longest).abs(), draw.choice((0.0, 0.05, 0.5, 2.0))
    cuts = sorted(draw.sample(range(1, rows), min(draw.randint(0, 2), rows - 1)))
    has_old = draw.random() < 0.8 and config.loss_type != "reinforce"
    return Setting(
        config=config,
        rewards_per_func=rewards,
        loss_mask=(torch.arange(longest) < lengths).long(),
        logps=logps,
        old=logps + distance * normal(rows, longest) if has_old else None,
        ref=logps + 0.5 * normal(rows, longest),
        sampled=logps + 0.2 * normal(rows, longest),
        entropies=normal(rows, longest).abs().float().double(),  # TRL takes their quantile in float32
        token_factors=normal(rows, longest) if draw.random() < 0.2 else None,
        parts=list(torch.arange(rows).tensor_split(cuts)),
    )


def our_sides(setting: Setting) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Advantages (B,) or (B, C), the loss, and its gradients with respect to log-probabilities and entropies."""
    config = setting.config
    rewards = combine_rewards(setting.rewards_per_func, config.reward_weights)
    advantages = trainer.compute_advantages(rewards, config)
    if setting.token_factors is not None:
        advantages = advantages[:, None] * setting.token_factors
    leaves = setting.logps.clone().requires_grad_(), setting.entropies.clone().requires_grad_()
    rollout: Any = SimpleNamespace(sampling_per_token_logps=setting.sampled)
    batch = trainer.Batch(rollout, setting.rewards_per_func, rewards, advantages, setting.loss_mask)
    model: Any = torch.nn.Module()
    sampler = (Sampler if config.rollout_quantization is None else QuantizedSampler)(model, model, config)
    weights = token_weights(
        setting.loss_mask, loss_type=config.loss_type, max_completion_length=config.max_completion_length
    )
    rows = torch.arange(len(setting.loss_mask))
    ref = setting.ref if config.beta else None
    state: Any = SimpleNamespace(sampler=sampler)
    training = trainer.Training(model, model, (), (), config, state)
    update = trainer.Update(training, batch, rows, weights, ref, setting.old)
    with patch.object(trainer, "logps_of_rows", lambda _, __, rows, *___, **____: [leaf[rows] for leaf in leaves]):
        losses = [trainer.micro_batch_loss(update, part)[0] for part in setting.parts]
    loss = torch.stack(losses).sum()
    return advantages, loss.detach(), gradients(loss, leaves)


def gradients(loss: Tensor, leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to both, 0 if the loss does not depend on one of them."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return found[0], found[1]


@contextmanager
def as_set(theirs: Any, setting: Setting) -> Iterator[None]:
    """TRL's trainer with these settings, as its constructor would set them."""
    config = setting.config
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    attributes = {
        "num_generations": config.num_generations,
        "max_completion_length": config.max_completion_length,
        "loss_type": AS_TRL.get(config.loss_type) or LOSSES[config.loss_type].trl,
        "importance_sampling_level": config.importance_sampling_level,
        "epsilon_low": config.epsilon,
        "epsilon_high": high if config.loss_type != "reinforce" else 1e9,
        "beta": config.beta,
        "entropy_coef": config.entropy_coef,
        "_entropy_bonus_enabled": config.entropy_coef != 0,
        "scale_rewards": config.scale_rewards,
        "use_vllm": config.rollout_quantization is not None,
        "vllm_importance_sampling_correction": config.rollout_quantization is not None,
    }
    arguments = {"use_bias_correction_kl": config.use_bias_correction_kl}
    with patch.multiple(theirs, **attributes), patch.multiple(theirs.args, **arguments):
        yield


def trl_advantages(theirs: Any, setting: Setting) -> Tensor:
    """Return what TRL's rollout method makes of these rewards, (B,); the generation and the rewards are given to it."""
    config, rows = setting.config, setting.config.batch_size
    generated: tuple = ([[5, 6]] * rows, [[7, 8]] * rows, None, ["a"] * rows, None, {}, None, None)
    weights = torch.tensor(config.reward_weights or [1.0] * len(setting.rewards_per_func.T), dtype=torch.float64)
    functions = [accuracy_reward] * len(weights)
    with patch.multiple(
        theirs,
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *_: setting.rewards_per_func.clone(),
        reward_funcs=functions,
        reward_func_names=[f"reward_{number}" for number in range(len(weights))],
        reward_weights=weights,
        beta=0.0,  # the reference is given to the loss
        use_vllm=False,
    ):
        return theirs._generate_and_score_completions([{"prompt": "a"}] * rows)["advantages"]


def trl_sides(theirs: Any, setting: Setting) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """As `our_sides`, computed by TRL's own methods."""
    config, mask = setting.config, setting.loss_mask
    leaves = setting.logps.clone().requires_grad_(), setting.entropies.clone().requires_grad_()
    empty = torch.zeros(len(mask), 0, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": mask,
        "completion_mask": mask,
        "num_items_in_batch": torch.tensor(len(mask)) if config.loss_type == "reinforce" else mask.sum(),
        "ref_per_token_logps": setting.ref,
    }
    if setting.old is not None:
        inputs["old_per_token_logps"] = setting.old
    if config.rollout_quantization is not None:
        old = setting.logps if setting.old is None else setting.old
        inputs["sampling_per_token_logps"] = setting.sampled
        ratio = ((old - setting.sampled) * mask).exp()
        inputs["importance_sampling_ratio"] = ratio.clamp(max=config.importance_sampling_clip_max)
    with (
        as_set(theirs, setting),
        patch.object(theirs, "_get_per_token_logps_and_entropies", lambda *_, **__: (*leaves, None)),
    ):
        advantages = trl_advantages(theirs, setting)
        if setting.token_factors is not None:
            advantages = advantages[:, None] * setting.token_factors
        loss = theirs._compute_loss(theirs.model, {**inputs, "advantages": advantages})
    return advantages, loss.detach(), gradients(loss, leaves)


def make_trl_trainer() -> Any:
    """Return a trainer of TRL, whose model is never used."""
    logging.getLogger("trl").setLevel(logging.ERROR)
    model, tokenizer = load_policy("tiny")
    config = GRPOConfig(prompts_per_step=1, max_steps=1)
    theirs: Any = build_trainer(model, tokenizer, load_problems("basic"), accuracy_reward, config)
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = theirs.args.steps_per_generation = 1
    return theirs


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest of TRL's numbers (at least 1e-3)."""
    if ours.shape != theirs.shape:
        raise ValueError(f"ours has shape {tuple(ours.shape)}, TRL's {tuple(theirs.shape)}")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


def compare(theirs: Any, setting: Setting) -> dict[str, float]:
    """Return the relative differences of one setting: of the advantages, of the loss and of its gradients."""
    found, expected = our_sides(setting), trl_sides(theirs, setting)
    return {
        "advantages": difference(found[0], expected[0]),
        "loss": difference(found[1], expected[1]),
        "gradient": max(map(difference, found[2], expected[2])),
    }


def main() -> int:
    """Compare, print the table and keep it; exit 1 if a difference is more than rounding."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--settings", type=int, default=SETTINGS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "parity.json")
    options = parser.parse_args()
    theirs = make_trl_trainer()
    torch.set_default_dtype(torch.float64)  # TRL makes tensors of its settings in this format
    draw = random.Random(options.seed)
    worst: dict[str, dict[str, Any]] = {name: {"loss type": name, "settings": 0} for name in COMPARED}
    for number in range(options.settings):
        setting = draw_setting(draw)
        row = worst[setting.config.loss_type]
        row["settings"] += 1
        for name, value in compare(theirs, setting).items():
            if value > TOLERANCE:
                print(f"setting {number}: {name} {value:.1e} {setting.config}", flush=True)
            row[name] = max(row.get(name, 0.0), value)
    rows = list(worst.values())
    print(markdown([{k: f"{v:.0e}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]))
    names = ("advantages", "loss", "gradient")
    verdicts = {
        f"every {name} agrees within {TOLERANCE:g}": all(row[name] <= TOLERANCE for row in rows) for name in names
    }
    save(
        options.output,
        COMMAND,
        {"settings": options.settings, "seed": options.seed, "rows": rows, "verdicts": verdicts},
    )
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
