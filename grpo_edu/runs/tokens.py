"""What one step did to each token: a record of plain values, which a page can show and from which it can compute.

A `TokenRecorder` scores the completions of a step before and after each of its updates. The record holds what
`grpo_edu.losses` needs to say how strongly the next update pushes each token, under the settings of the run or under
others, and the log-probabilities after the update, which say what it really did. A run writes its records to
`tokens.jsonl.gz`, one line per step. `grpo_edu.figures.tokens` draws them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_edu.advantages import group_advantages, rloo_advantages
from grpo_edu.batch import Batch
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import adapters_off, reference_policy
from grpo_edu.rollout import Rollout
from grpo_edu.runs.completions import GzipLines, kept_file, read_lines, recorded_steps
from grpo_edu.runs.folder import TOKENS
from grpo_edu.runs.log import to_plain
from grpo_edu.trainer import Stages, Update, optimizer_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST_TOKENS = 8000  # tokens of a step that are kept, in whole groups
PART = "⋯"  # the text of a token that is a part of a character, such as an emoji's first bytes
ALTERNATIVES = 4  # of each token: the most probable ones before the update
_LOGITS = 2**25  # of one forward pass
_PLACES = 6  # decimals of a log-probability
# Settings of a run that change its loss, but that the page does not compute.
_LEFT_OUT = ("entropy_coef", "use_bias_correction_kl")


class TokenRecorder:
    """Records the tokens of some steps of a training; hand its `stages` to `grpo_edu.trainer.train`.

    A step that is recorded takes one more forward pass over its completions before its first update and one after each
    update. Without a KL term the trainer has no reference policy, so the recorder keeps a copy of the model at the
    start of the run, in memory of the model's size. Nothing of the training changes.

    Args:
        model, tokenizer, config: those of the training, before its first step.
        steps: numbers of the steps to record; "first", "last" or "all" name them too.

    Attributes:
        record: record of the last step that was recorded; None before that.

    >>> import grpo_edu
    >>> model, tokenizer = grpo_edu.load_policy("tiny")
    >>> config = grpo_edu.GRPOConfig(prompts_per_step=1, num_generations=2, max_steps=1, max_completion_length=8)
    >>> recorder = TokenRecorder(model, tokenizer, config)
    >>> problems = grpo_edu.load_problems("basic", "train", n=1)
    >>> history = list(
    ...     grpo_edu.train(model, tokenizer, problems, grpo_edu.accuracy_reward, config, stages=recorder.stages)
    ... )
    >>> recorder.record["step"], len(recorder.record["groups"][0]["completions"])
    (1, 2)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: GRPOConfig,
        steps: Sequence[int | str] = ("all",),
    ) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.steps = recorded_steps(steps, config.max_steps)
        self.record: dict[str, Any] | None = None
        self._own_reference = None if config.beta or not self.steps else reference_policy(model)

    @property
    def stages(self) -> Stages:
        """The stages of a training whose steps are recorded."""
        return Stages(optimizer_step=self.step)

    def record_of(self, step: int) -> dict[str, Any] | None:
        """Return the record of a step, if this was the last one recorded."""
        return self.record if self.record is not None and self.record["step"] == step else None

    def step(self, update: Update, micro_batches: Sequence[Tensor]) -> tuple[dict[str, float], Tensor]:
        """`grpo_edu.trainer.optimizer_step`, with a look at every token before and after it."""
        model, state, config = update.training.model, update.training.state, update.training.config
        if state.batch_step not in self.steps:
            return optimizer_step(update, micro_batches)
        if update.old_per_token_logps is None:  # the first update of a step, or another attempt at it
            scored = score_tokens(model, update.batch.rollout, config.temperature)
            self._logps, self._best = [scored.logps], scored
        found = optimizer_step(update, micro_batches)
        last = len(self._logps) == config.num_iterations
        scored = score_tokens(model, update.batch.rollout, config.temperature, self._best.best_ids if last else None)
        self._logps.append(scored.logps)
        if last:
            reference = self._own_reference if state.reference is None else state.reference
            ref = None
            if reference is not None:
                with adapters_off(reference):
                    ref = score_tokens(reference, update.batch.rollout, config.temperature).logps
            rows = torch.arange(len(update.batch.rewards), device=self._logps[0].device)
            self.record = token_record(
                update.batch,
                self._logps,
                self.tokenizer,
                config,
                step=state.batch_step,
                ref_per_token_logps=ref,
                importance_weights=state.sampler.importance_weights(self._logps[0], update.batch.rollout, rows),
                best=(self._best.best_ids, self._best.best_logps, scored.best_logps),
            )
        return found


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probabilities under one policy.

    logps: (B, C), of the sampled tokens, nats, 0 in the padding. best_ids, best_logps: (B, C, ALTERNATIVES), of the
    requested tokens, or otherwise of the most probable ones.
    """

    logps: Tensor
    best_ids: Tensor
    best_logps: Tensor


@torch.no_grad()
def score_tokens(
    model: PreTrainedModel, rollout: Rollout, temperature: float, ids: Tensor | None = None
) -> ScoredTokens:
    """Score all tokens of a rollout under a policy, and the alternatives to them.

    Unlike `grpo_edu.fast.packing.per_token_logps`, this computes the whole distribution of every token, a few rows at a
    time, so it is for looking and not for training.

    Args:
        temperature: sampling temperature; logits are divided by it.
        ids: (B, C, n), the alternatives to score; None takes the most probable tokens.
    """
    rows, columns = rollout.completion_ids.shape
    device = rollout.completion_ids.device
    logps = torch.zeros(rows, columns, device=device)
    best_ids = torch.zeros(rows, columns, ALTERNATIVES, dtype=torch.long, device=device) if ids is None else ids
    best_logps = torch.zeros(best_ids.shape, device=device)
    for row in range(0, rows, rollout.num_generations):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] == 1]
        group = torch.arange(row, row + rollout.num_generations, device=device)
        width = int(rollout.completion_mask[group].sum(dim=1).max())
        most = max(1, _LOGITS // (max(1, width) * model.config.vocab_size))
        for part in group.split(most):
            sampled = rollout.completion_ids[part, :width]
            read = torch.cat([prompt.expand(len(part), -1), sampled], dim=1)
            logits = model(input_ids=read, use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
            scores = (logits.float() / temperature).log_softmax(dim=-1)
            logps[part, :width] = scores.gather(-1, sampled[..., None])[..., 0] * rollout.completion_mask[part, :width]
            if ids is None:
                best_ids[part, :width] = scores.topk(min(ALTERNATIVES, scores.shape[-1]), dim=-1).indices
            best_logps[part, :width] = scores.gather(-1, best_ids[part, :width])
    return ScoredTokens(logps, best_ids, best_logps)


def token_text(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return the text of a token alone; PART if it writes a part of a character."""
    text = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token))
    return PART if "�" in text else text


def join_parts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
    """Return the texts of a completion's tokens; the last of those that write one character together has it."""
    joined = list(texts)
    for end, text in enumerate(texts):
        begin = end
        while begin and joined[begin - 1] == PART:
            begin -= 1
        if text == PART and "�" not in (character := tokenizer.decode(ids[begin : end + 1])):
            joined[end] = character
    return joined


def token_record(
    batch: Batch,
    per_token_logps: Sequence[Tensor],
    tokenizer: PreTrainedTokenizerBase,
    config: GRPOConfig,
    *,
    step: int,
    ref_per_token_logps: Tensor | None = None,
    importance_weights: Tensor | None = None,
    best: tuple[Tensor, Tensor, Tensor] | None = None,
    most_tokens: int = MOST_TOKENS,
) -> dict[str, Any]:
    """Return the record of one step, in plain values for a JSON file.

    Args:
        batch: B scored completions of at most C tokens.
        per_token_logps: μ + 1 tensors (B, C), nats: before the first update, and after each of the μ updates.
        ref_per_token_logps: (B, C), nats; None if there is no reference policy.
        importance_weights: (B, C), where another policy than the trained one sampled (quantized rollouts).
        best: ids (B, C, n) of alternatives, and their log-probabilities before and after the updates.
        most_tokens: groups are kept in their order while their tokens are not more than this; the first is always kept.
    """
    rollout, size = batch.rollout, config.num_generations
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    column = batch.advantages if batch.advantages.ndim == 1 else batch.advantages[:, 0]
    groups: list[dict[str, Any]] = []
    tokens = 0
    text_of = cache(partial(token_text, tokenizer))

    def plain(values: Tensor) -> list[float]:
        return [round(value, _PLACES) for value in values.tolist()]

    def completion(row: int) -> dict[str, Any]:
        length = lengths[row]
        sampled = rollout.completion_ids[row, :length].tolist()
        found: dict[str, Any] = {
            "reward": to_plain(batch.rewards[row]),
            "advantage": round(column[row].item(), _PLACES),
            "tokens": join_parts(tokenizer, sampled, [text_of(token) for token in sampled]),
            "sampling": plain(rollout.sampling_per_token_logps[row, :length]),
            "logps": [plain(logps[row, :length]) for logps in per_token_logps],
        }
        if ref_per_token_logps is not None:
            found["ref"] = plain(ref_per_token_logps[row, :length])
        if (counts := batch.loss_mask[row, :length].long().tolist()) != [1] * length:
            found["counts"] = counts
        if importance_weights is not None:
            found["importance"] = plain(importance_weights[row, :length])
        if best is not None:
            ids, before, after = (values[row, :length].tolist() for values in (best[0], *(x.exp() for x in best[1:])))
            found["alternatives"] = [
                [
                    [text_of(token), round(one, _PLACES), round(other, _PLACES)]
                    for token, one, other in zip(*place, strict=True)
                ]
                for place in zip(ids, before, after, strict=True)
            ]
        return found

    for first in range(0, len(batch.rewards), size):
        tokens += sum(lengths[first : first + size])
        if groups and tokens > most_tokens:
            break
        rows = [completion(row) for row in range(first, first + size)]
        groups.append({"index": first // size, "prompt": rollout.prompts[first], "completions": rows})
    left_out = [key for key in _LEFT_OUT if getattr(config, key)]
    return {
        "step": step,
        "settings": {
            "loss": config.loss_type,
            "scaling": _scaling(batch, config),
            "low": config.epsilon,
            "high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "beta": config.beta,
            "level": config.importance_sampling_level,
        },
        "left_out": left_out,
        "learning_rate": config.learning_rate,
        "max_completion_length": config.max_completion_length,
        "num_tokens": int(batch.loss_mask.sum()),
        "rewards": to_plain(batch.rewards.tolist()),
        "groups": groups,
    }


def _scaling(batch: Batch, config: GRPOConfig) -> str:
    """Return how the advantages of a batch come from its rewards; "recorded" where they come from something else."""
    if config.advantage_estimator == "rloo":
        name, expected = "rloo", rloo_advantages(batch.rewards, config.num_generations)
    else:
        name = config.scale_rewards
        expected = group_advantages(batch.rewards, config.num_generations, scale_rewards=name)
    same = batch.advantages.shape == expected.shape and torch.allclose(batch.advantages, expected.to(batch.advantages))
    return name if same else "recorded"


class TokenLog(GzipLines):
    """Appends the records of a run to its file. done: steps that are kept of a run that is resumed."""

    def append(self, record: dict[str, Any] | None) -> None:
        """Write the record of one step, if there is one."""
        if record is not None:
            self.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode())


def read_tokens(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """Read the token record that a run kept of one step; None takes the last one.

    Raises ValueError if the run kept none, or none of this step.
    """
    lines = _read_lines(folder)
    if step is not None and step not in lines:
        known = ", ".join(map(str, lines))
        raise ValueError(
            f"`step`: the tokens of step {step} are not kept in {folder}; it keeps those of {known}. Choose one of "
            f"them, or train again with the option --inspect-steps {step}."
        )
    return json.loads(lines[max(lines) if step is None else step])


def read_all_tokens(folder: str | Path) -> list[dict[str, Any]]:
    """Read the token records of all steps of which a run kept one; raises ValueError if it kept none."""
    return [json.loads(line) for line in _read_lines(folder).values()]


def _read_lines(folder: str | Path) -> dict[int, bytes]:
    """Return step → its line in the file of token records; raises ValueError if there is none."""
    lines = dict(_records(kept_file(folder, TOKENS)))
    if not lines:
        raise ValueError(
            f"`run`: {folder} keeps no token records; train again with the option --inspect-steps first,10,last."
        )
    return lines


def kept_steps(folder: str | Path) -> list[int]:
    """Return the steps whose tokens a run keeps."""
    return [step for step, _ in _records(Path(folder) / TOKENS)]


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    for line in read_lines(path) if path.is_file() else ():
        yield int(line[len(b'{"step":') : line.index(b",")]), line
