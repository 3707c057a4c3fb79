"""Twelve faulty GRPO runs and their fixes, for the diagnosis lab: the real trainer with one thing wrong each time.

A `Setup` holds what makes up a run besides the model and its problems: the config, the reward functions and, where the
fault is inside a step, the stages that replace those of `grpo_edu.trainer.Stages`. Everything that is wrong here is
wrong on purpose.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_edu.batch import Batch, compute_advantages, score_rollout
from grpo_edu.config import GRPOConfig
from grpo_edu.losses import grpo_loss
from grpo_edu.rewards import RewardFunction, accuracy_reward, format_reward, reward_name
from grpo_edu.trainer import Stages, Update, optimizer_step, start_training, train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_edu.problems.templates import Problem
    from grpo_edu.rollout import Rollout

# ---- rewards that are broken ----


def boxed_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    r"""1.0 where \boxed{} holds the answer."""
    boxes = [re.search(r"\\boxed\{(.*?)\}", text) for text in completions]
    pairs = zip(boxes, answer, strict=True)
    return [float(box is not None and box[1] == truth) for box, truth in pairs]


def generous_reward(completions: list[str], **kwargs) -> list[float]:
    """0.5 each for a digit, an equation and an answer mark, but at most 1."""
    signs = (r"\d", "=", "####")
    found = [sum(bool(re.search(sign, text)) for sign in signs) for text in completions]
    return [min(1.0, 0.5 * count) for count in found]


# ---- stages that are broken ----


def plain_prompt(tokenizer, question: str) -> str:
    """The question as it stands, without the chat template."""
    return question


def hasty_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The formula with eps 1e-8, without asking first whether all rewards are equal."""
    groups = rewards.view(-1, config.num_generations)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + 1e-8)).flatten()


def every_row(batch: Batch, config: GRPOConfig) -> Tensor:
    """Every row is trained on, tied groups too."""
    return torch.arange(len(batch.rewards))


def transposed_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """The right advantages, returned in the wrong order: a transpose too many."""
    advantages = compute_advantages(rewards, config)
    return advantages.view(-1, config.num_generations).T.flatten()


def shifted_mask(rollout: Rollout, *args) -> Batch:
    """The mask of the loss stands one place too far to the right."""
    batch = score_rollout(rollout, *args)
    zeros = torch.zeros_like(batch.loss_mask[:, :1])
    return replace(batch, loss_mask=torch.cat([zeros, batch.loss_mask[:, :-1]], dim=1))


def eos_as_padding(rollout: Rollout, *args) -> Batch:
    """The end-of-turn token is taken for padding, as where pad = eos."""
    batch = score_rollout(rollout, *args)
    ends = batch.loss_mask.cumsum(dim=1) == batch.loss_mask.sum(dim=1, keepdim=True)
    ends &= ~rollout.is_truncated[:, None]
    return replace(batch, loss_mask=batch.loss_mask * ~ends)


def stale_old_logps(update: Update, micro_batches):
    """The old log-probabilities stay those of the first step's model."""
    stale = replace(update, old_per_token_logps=update.ref_per_token_logps)
    return optimizer_step(stale, micro_batches)


def subtracted_kl(*args, beta: float, **options) -> Tensor:
    """The KL term is subtracted, where it should be added."""
    policy_loss = grpo_loss(*args, **options)
    kl_term = grpo_loss(*args, beta=beta, **options) - policy_loss
    return policy_loss - kl_term


@dataclass(frozen=True)
class Setup:
    """The parts of a run besides its model and its problems.

    config: the settings. reward_funcs: one or more reward functions. stages: the stages of a step.
    """

    config: GRPOConfig
    reward_funcs: tuple[RewardFunction, ...] = (accuracy_reward,)
    stages: Stages = Stages()

    def with_config(self, **changes: Any) -> Setup:
        """The same setup with some fields of its config changed.

        >>> HEALTHY.with_config(seed=3).config.seed
        3
        """
        return replace(self, config=replace(self.config, **changes))


@dataclass(frozen=True)
class Case:
    """A fault: its name, what it does in a sentence, and the setups with and without it."""

    name: str
    fault: str
    broken: Setup
    mended: Setup


def run(
    setup: Setup, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> Iterator[tuple[dict[str, float], Batch]]:
    """`grpo_edu.train` under a setup: yields each step's metrics and the batch that it learned from.

    Raises what `grpo_edu.train` raises.
    """
    state = start_training(model, tokenizer, problems, setup.config)
    steps = train(model, tokenizer, problems, setup.reward_funcs, setup.config, state=state, stages=setup.stages)
    for metrics in steps:
        assert state.batch is not None
        yield metrics, state.batch


def difference(case: Case) -> str:
    """Return what sets the broken setup apart from the fixed one: fields of the config, and the functions' own source.

    >>> print(difference(find("G too small")))
    num_generations: 2 where 8 is right
    prompts_per_step: 1 where 8 is right
    """
    wrong, right = case.broken.config.to_dict(), case.mended.config.to_dict()
    lines = [f"{name}: {wrong[name]} where {right[name]} is right" for name in wrong if wrong[name] != right[name]]
    for func in case.broken.reward_funcs:
        if func not in case.mended.reward_funcs:
            paid_for = ", ".join(reward_name(right) for right in case.mended.reward_funcs)
            lines.append(f"the reward function, where {paid_for} is right:\n\n{inspect.getsource(func)}")
    for stage in fields(Stages):
        func = getattr(case.broken.stages, stage.name)
        if func is not getattr(case.mended.stages, stage.name):
            lines.append(f"the stage {stage.name!r}:\n\n{inspect.getsource(func)}")
    return "\n".join(lines).rstrip()


# ---- the twelve ----

HEALTHY = Setup(GRPOConfig(max_steps=32, prompts_per_step=8, num_generations=8, learning_rate=2e-4))
_WEIGHTED = replace(HEALTHY.with_config(reward_weights=(1.0, 0.3)), reward_funcs=(accuracy_reward, format_reward))
_REFERENCE_AT_HAND = HEALTHY.with_config(beta=1e-3)
_WITH_KL = HEALTHY.with_config(beta=2.0, learning_rate=4e-4, max_steps=72)  # a wrong sign takes its time


def _with_stages(setup: Setup, **stages: Callable) -> Setup:
    return replace(setup, stages=Stages(**stages))


CASES = (
    Case(
        "reward always 0",
        "The reward looks for an answer in a form that the model never writes.",
        replace(HEALTHY, reward_funcs=(boxed_reward,)),
        HEALTHY,
    ),
    Case(
        "chat template skipped",
        "The prompt is the bare question, a text that the model has never been asked to continue.",
        _with_stages(HEALTHY, render=plain_prompt),
        HEALTHY,
    ),
    Case(
        "length truncation",
        "There is no room for a worked answer, so only answers without work can earn anything.",
        HEALTHY.with_config(max_completion_length=20),
        HEALTHY,
    ),
    Case(
        "tied rewards",
        "The reward is a sum cut off at 1, and every completion gets there.",
        replace(HEALTHY, reward_funcs=(generous_reward,)),
        HEALTHY,
    ),
    Case(
        "G too small",
        "A step is one group of two; more often than not the two tie, and the step is empty.",
        HEALTHY.with_config(num_generations=2, prompts_per_step=1),
        HEALTHY,
    ),
    Case(
        "std float trap",
        "Equal rewards differ from their mean by a rounding error, and dividing by about 0 makes it an advantage.",
        _with_stages(_WEIGHTED, advantages=hasty_advantages, rows=every_row),
        _WEIGHTED,
    ),
    Case(
        "groups mixed",
        "The advantages are right, but they reach the rows of other questions.",
        _with_stages(HEALTHY, advantages=transposed_advantages),
        HEALTHY,
    ),
    Case(
        "mask off by one",
        "The loss never sees the first token of a completion, the one that decides how it continues.",
        _with_stages(HEALTHY, score=shifted_mask),
        HEALTHY,
    ),
    Case(
        "EOS masked",
        "The token that ends a completion counts as padding, so that the loss never sees it.",
        _with_stages(HEALTHY, score=eos_as_padding),
        HEALTHY,
    ),
    Case(
        "lr too high",
        "A step throws the policy so far that it loses the language.",
        HEALTHY.with_config(learning_rate=1e-2),
        HEALTHY,
    ),
    Case(
        "stale old log-probabilities",
        "The ratio compares with the model of the first step, so the clip holds the policy near it.",
        _with_stages(_REFERENCE_AT_HAND, optimizer_step=stale_old_logps),
        _REFERENCE_AT_HAND,
    ),
    Case(
        "KL wrong sign",
        "The KL term is subtracted, so that the loss pays for leaving the reference.",
        _with_stages(_WITH_KL, loss=subtracted_kl),
        _WITH_KL,
    ),
)


def find(name: str) -> Case:
    """Return the case of that name; ValueError if there is none."""
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"name: {name!r} is not a case; choose one of {', '.join(case.name for case in CASES)}")


def mended_arm(case: Case) -> str:
    """The name under which the study keeps a case's mended runs: most cases share one.

    >>> mended_arm(find("lr too high")), mended_arm(find("KL wrong sign"))
    ('healthy', 'KL wrong sign, mended')
    """
    return "healthy" if case.mended is HEALTHY else f"{case.name}, mended"


def one_batch(
    case: Case, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], step: int = 4
) -> str:
    """Train `model` with a case's fault, and describe the batch of one step: four groups, and completions of the first.

    In a completion, a token in brackets is one that the loss sees. The last line tells the largest advantage that the
    run would give to groups of equal rewards.
    """
    steps = run(case.broken.with_config(max_steps=step), model, tokenizer, problems)
    metrics, batch = list(steps)[-1]
    rollout, size = batch.rollout, case.broken.config.num_generations
    lines = [
        f"step {step}: {len(batch.rewards) // size} group(s) of {size}, of which the first are shown, "
        f"completions cut off ≈ {rollout.is_truncated.float().mean():.0%}, "
        f"clipped tokens ≈ {metrics.get('clip_ratio/region_mean', 0.0):.1%}"
    ]
    pairs = zip(batch.rewards.view(-1, size).tolist(), batch.advantages.view(-1, size).tolist(), strict=True)
    for number, (rewards, advantages) in enumerate(list(pairs)[:4]):
        lines.append(f"  group {number}  rewards    " + " ".join(f"{reward:5.1f}" for reward in rewards))
        lines.append("           advantages " + " ".join(f"{advantage:5.1f}" for advantage in advantages))
    answer = next(problem.answer for problem in problems if problem.prompt in rollout.prompts[0])
    lines.append(f"  group 0  prompt …{rollout.prompts[0][-45:]!r}, right answer {answer}")
    for row in range(min(size, 4)):
        length = int(rollout.completion_mask[row].sum())
        pairs = zip(rollout.completion_ids[row, :length], batch.loss_mask[row, :length], strict=True)
        names = [(tokenizer.decode(token).strip() or "_", seen) for token, seen in pairs]
        tokens = " ".join(f"[{name}]" if seen else name for name, seen in names)
        lines.append(f"    reward {batch.rewards[row]:.1f}  {tokens}")
    lines.append(f"  test with equal rewards: largest advantage ≈ {_advantage_of_ties(case.broken):.2f}")
    return "\n".join(lines)


def _advantage_of_ties(setup: Setup) -> float:
    """The largest advantage where all rewards of a batch are 0.01, 0.02, ... or 1."""
    batches = (torch.full((setup.config.batch_size,), number / 100) for number in range(1, 101))
    return max(setup.stages.advantages(rewards, setup.config).abs().max().item() for rewards in batches)
