"""Stage after stage: train on a task, hold on to the earlier ones, and measure all of them after each.

Nothing here is a trainer. A stage is `grpo_edu.train` or `grpo_edu.continual.supervised.finetune`, and a protection
is what those already take: a penalty, a KL, or other problems.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from grpo_edu.config import GRPOConfig, check_numbers
from grpo_edu.continual.ewc import Anchor, anchor_penalty, copy_params, merge_anchors, uniform_fisher
from grpo_edu.continual.fisher import fisher_diagonal, lightning_fisher, rollout_examples, solution_examples
from grpo_edu.continual.forgetting import AccuracyMatrix
from grpo_edu.continual.stages import Curriculum, Protection, Stage
from grpo_edu.continual.supervised import finetune
from grpo_edu.evaluation import Evaluation, evaluate
from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.progress import ProgressBars
from grpo_edu.prompts import render_prompt
from grpo_edu.rollout import generate
from grpo_edu.runs.loading import resolve_rewards
from grpo_edu.runs.symptoms import sample_weights, unchanged
from grpo_edu.trainer import train

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Progress:
    """The state of a curriculum.

    rows: an `Evaluation` of each task before any stage, then after each. histories: the metrics of each stage's steps.
    anchors: anchors of the stages done, for "ewc" and "l2".
    """

    rows: list[list[Evaluation]] = field(default_factory=list)
    histories: list[list[dict[str, float]]] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)

    @property
    def stages_done(self) -> int:
        """Stages that are trained and evaluated."""
        return max(0, len(self.rows) - 1)

    def matrix(self, tasks: Sequence[str]) -> AccuracyMatrix:
        """Return the rows so far as a matrix of outcomes."""
        return AccuracyMatrix.from_evaluations(tasks, self.rows)


def run_curriculum(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    curriculum: Curriculum,
    training: Sequence[Sequence[Problem]],
    heldout: Sequence[Sequence[Problem]],
    *,
    progress: Progress | None = None,
) -> Iterator[Progress]:
    """Train `model` in place, stage by stage; yields the progress before any stage, then after each.

    Args:
        model, tokenizer: as `load_policy` returns them.
        curriculum: stages and protection.
        training, heldout: the problems of each stage's task.
        progress: of an earlier call with the same curriculum, to continue from; `model` must be as that left it.

    Raises what the trainings raise.
    """
    stages, protection = curriculum.stages, curriculum.protection
    progress = progress or Progress()

    if not progress.rows:
        progress.rows.append(_evaluate(model, tokenizer, stages, heldout))
        yield progress
    for number in range(progress.stages_done, len(stages)):
        stage, earlier = stages[number], [problem for part in training[:number] for problem in part]
        steps = train_stage(
            model, tokenizer, stage, training[number], protection=protection, anchors=progress.anchors, earlier=earlier
        )
        sample = sample_weights(model)
        history = []
        with ProgressBars() as bars:
            bars.show(stage.name, 0, stage.config.max_steps)
            for metrics in steps:
                history.append(metrics)
                bars.show(stage.name, len(history), stage.config.max_steps)
        progress.histories.append(history)
        if unchanged(model, sample):
            warnings.warn(
                f"stage {stage.name!r}: nothing was learned, because no weight changed by more than rounding; look at "
                "its learning_rate, warmup_steps and max_grad_norm, and with grpo at its rewards",
                RuntimeWarning,
                stacklevel=2,
            )
        progress.rows.append(_evaluate(model, tokenizer, stages, heldout))
        if number + 1 < len(stages):
            anchor = make_anchor(model, tokenizer, stage, training[number], protection)
            if anchor is not None and protection.online and progress.anchors:
                progress.anchors = [merge_anchors(progress.anchors[-1], anchor, decay=protection.decay)]
            elif anchor is not None:
                progress.anchors.append(anchor)
        yield progress


def train_stage(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    problems: Sequence[Problem],
    *,
    protection: Protection | None = None,
    anchors: Sequence[Anchor] = (),
    earlier: Sequence[Problem] = (),
) -> Iterator[dict[str, float]]:
    """Train one stage by its own method, with the protection translated into that training's own arguments.

    Args:
        anchors: of earlier tasks, for "ewc" and "l2"; without any, these protect nothing.
        earlier: the problems of earlier stages; without any, no method protects anything.

    Yields the metrics of each step.
    """
    protection = protection or Protection()
    config, penalty = stage.config, None
    if protection.method in ("ewc", "l2") and anchors:
        penalty = anchor_penalty(anchors, ewc_lambda=protection.strength)
    elif protection.method == "kl" and earlier:
        config = replace(config, beta=protection.strength)
    elif protection.method == "replay" and earlier:
        problems = mix_in(problems, earlier, share=protection.strength, seed=config.seed)
    if isinstance(config, GRPOConfig):
        return train(model, tokenizer, problems, resolve_rewards(stage.rewards), config, penalty=penalty)
    return finetune(model, tokenizer, problems, config, penalty=penalty)


def mix_in(problems: Sequence[Problem], earlier: Sequence[Problem], *, share: float, seed: int) -> list[Problem]:
    """Return all of `problems`, with enough of the earlier ones to make up `share` of the whole (replay).

    Raises ValueError for a share outside [0, 1).
    """
    check_numbers(share=share)
    wanted = round(len(problems) * share / (1 - share))
    rng = random.Random(seed)
    drawn = rng.sample(earlier, wanted) if wanted <= len(earlier) else rng.choices(earlier, k=wanted)
    return [*problems, *drawn]


def make_anchor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    problems: Sequence[Problem],
    protection: Protection,
) -> Anchor | None:
    """Return the anchor of a task that was just learned; None if the protection has no use for one.

    The Fisher is taken where the stage was trained: on worked solutions after a supervised stage, on the policy's own
    completions after GRPO.
    """
    if protection.method == "l2":
        return Anchor(uniform_fisher(model), copy_params(model))
    if protection.method != "ewc":
        return None
    if protection.fisher == "lightning":
        return Anchor(lightning_fisher(model), copy_params(model))
    seed = stage.config.seed
    chosen = random.Random(seed).sample(list(problems), min(protection.num_examples, len(problems)))
    generator = torch.Generator().manual_seed(seed)
    if isinstance(stage.config, GRPOConfig):
        rollout = generate(
            model,
            tokenizer,
            [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in chosen],
            num_generations=1,
            max_completion_length=stage.config.max_completion_length,
            generator=generator,
        )
        examples = rollout_examples(rollout)
    else:
        examples = solution_examples(tokenizer, chosen)
    fisher = fisher_diagonal(model, examples, kind=protection.fisher, tail=1e-3, generator=generator)
    return Anchor(fisher, copy_params(model))


def _evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stages: Sequence[Stage],
    heldout: Sequence[Sequence[Problem]],
) -> list[Evaluation]:
    """Evaluate all tasks. Supervised stages get room for the longest worked solution and half of it again."""
    found = []
    for stage, problems in zip(stages, heldout, strict=True):
        if isinstance(stage.config, GRPOConfig):
            length = stage.config.max_completion_length
        else:
            longest = max(len(ids) for ids in tokenizer([problem.solution for problem in problems])["input_ids"])
            length = longest + longest // 2 + 1
        seed = stages[0].config.seed
        found.append(evaluate(model, tokenizer, problems, max_completion_length=length, seed=seed))
    return found
