"""What the metrics of a run say about a training that failed, with the likely cause and what to do.

The questions are those of the decision tree in the diagnosis lab (notebook 12): is the reward near 0, do the groups
tie, does the reward break down? Two more look at the entropy and at the held-out answers. What the log alone decides
is judged by `grpo_edu.runs.log_diagnosis`; this module adds what the settings and the evaluations say about the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation, mcnemar
from grpo_edu.runs.log_diagnosis import (
    CUT,
    REWARD,
    MetricLog,
    becomes_certain,
    becomes_random,
    constant_rewards,
    first_ties,
    often_cut_off,
)

_SIGNIFICANT = 0.05
_LARGEST_SAMPLE = 4096  # weights of one tensor that are looked at
_FEW_WEIGHTS = 0.001  # share of the weights
_FEW_ANSWERS = 0.05  # share of completions with an answer


def find_symptoms(
    history: Sequence[Mapping[str, float]],
    config: GRPOConfig,
    before: Evaluation | None = None,
    after: Evaluation | None = None,
    *,
    unchanged: bool = False,
) -> list[str]:
    """Warnings about a run that did not learn, or became worse; each names the likely cause and a remedy.

    Args:
        history: the metrics of each step. config: the settings of the run.
        before, after: the evaluations on held-out problems; None where there is none.
        unchanged: no weight changed by more than rounding, see `unchanged`.

    >>> step = {"reward": 0.0, "grad_norm": 0.0, "frac_reward_zero_std": 1.0, "entropy": 0.2}
    >>> print(find_symptoms([step, step], GRPOConfig())[0][:54])
    No step had a gradient, so the weights did not change.
    """
    found = [_answers(config, before, after)]
    if history:
        log = MetricLog(history)
        found += [_weights(history, config, unchanged)]
        found += [_rewards(log, config, before), _entropy(log, config, after)]
        found += [_accuracy(log, config, before, after), _constant(log)]
        if not any("`max_completion_length`" in text for text in found):
            found.append(_cut_off(log, config))
    return [text for text in found if text]


def sample_weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of some weights of every tensor that is trained, for `unchanged`; at most 16 KB per tensor."""
    with torch.no_grad():
        return {name: _some(weight).clone() for name, weight in model.named_parameters() if weight.requires_grad}


def unchanged(model: nn.Module, sample: Mapping[str, Tensor]) -> bool:
    """Whether almost no weight differs from a sample by more than the rounding of its number format."""
    weights = dict(model.named_parameters())
    moved = total = 0
    with torch.no_grad():
        largest = max(float(then.abs().max()) for then in sample.values())
        for name, then in sample.items():
            size = torch.where(then == 0, largest, then.abs().double())
            change = (_some(weights[name]).double() - then.double()).abs()
            moved += int((change > torch.finfo(then.dtype).eps * size).sum())
            total += then.numel()
    return moved < _FEW_WEIGHTS * total


def _some(weight: Tensor) -> Tensor:
    flat = weight.detach().flatten()
    return flat[:: max(1, len(flat) // _LARGEST_SAMPLE)]


def _weights(history: Sequence[Mapping[str, float]], config: GRPOConfig, unchanged: bool) -> str:
    """Whether the settings kept the weights where they were, or the learning rate below what it was set to."""
    warm_up = f"`warmup_steps` is {config.warmup_steps} and the run has {config.max_steps} steps"
    is_short = config.lr_scheduler_type != "constant" and config.warmup_steps >= config.max_steps
    if not unchanged:
        return f"{warm_up}, so the learning rate never reached `learning_rate`. Lower `warmup_steps`." * is_short
    if all(step["grad_norm"] == 0 for step in history):
        return ""  # `_rewards` says why
    nothing = "Nothing was learned: no weight changed by more than rounding. The likely cause:"
    longest = max(step["grad_norm"] for step in history)
    if config.max_grad_norm and config.max_grad_norm < 1e-6 * longest:
        return (
            f"{nothing} `max_grad_norm` is {config.max_grad_norm:g}, and every gradient was shortened to it from up to "
            f"{longest:.2g}. Set it to 1."
        )
    if is_short:
        return f"{nothing} {warm_up}, so the learning rate stayed close to 0. Lower `warmup_steps`."
    rate = f"`learning_rate` is {config.learning_rate:g}"
    return f"{nothing} {rate}, too small for the number format of the weights. Raise it, for example to 1e-4."


def _rewards(log: MetricLog, config: GRPOConfig, before: Evaluation | None) -> str:
    """The first three questions of the decision tree; "" where all of them are answered with no."""
    first, last = log.ends(REWARD) or (0.0, 0.0)
    tied, no_gradient = first_ties(log), not any(log.values("grad_norm"))
    effect = (
        "No step had a gradient, so the weights did not change. "
        if no_gradient
        else f"In the first steps, {tied:.0%} of the groups were tied and had no gradient. "
    )
    cut_off = (log.ends(CUT) or (0.0, 0.0))[0]
    longer = f"raise `max_completion_length`, which is {config.max_completion_length}."
    if no_gradient and config.mask_truncated_completions and cut_off == 1:
        return f"{effect}All completions were truncated, and `mask_truncated_completions` leaves them out: {longer}"
    ties_matter = config.advantage_estimator != "none"  # there, equal rewards have a gradient, unless all are 0
    if tied >= 0.5 and (no_gradient or ties_matter and last < first + 0.1):
        return effect + _why_tied(first, cut_off, longer, config, before)
    if len(log.rows) >= 8 and first > 0 and last < first / 2:
        return f"The mean reward fell from {first:.2f} to {last:.2f}. {_lower(config)}"
    return ""


def _why_tied(first: float, cut_off: float, longer: str, config: GRPOConfig, before: Evaluation | None) -> str:
    """Why most groups tie from the first steps on, and what to do. first: the mean reward there."""
    if abs(first) < 0.1:
        unpaid = "The reward was 0 or close to it from the first step, so"
        if cut_off >= 0.5:
            return f"{unpaid} look at the length first: {cut_off:.0%} of the completions were truncated; {longer}"
        if before is not None and before.accuracy >= 0.1:
            return (
                f"{unpaid} the reward function probably cannot read the answers: the model solved "
                f"{before.accuracy:.0%} of the held-out problems before training. Call it with correct completions."
            )
        return (
            f"{unpaid} read ten samples. Correct answers mean that the reward function cannot read them; nonsense "
            "means that the prompt lacks the chat template; otherwise the problems are too hard: choose easier `data`."
        )
    if config.num_generations < 4:
        return f"`num_generations` is {config.num_generations}; with so few completions most groups tie. Set it to 8."
    if before is not None and before.accuracy >= 0.9:
        return f"The model solved {before.accuracy:.0%} of the problems before training; choose harder `data`."
    return (
        "The completions of a group get the same reward. Call the reward function with wrong completions, because it "
        "may pay for anything; if it does not, raise `num_generations` or `temperature`."
    )


def _entropy(log: MetricLog, config: GRPOConfig, after: Evaluation | None) -> str:
    """Whether the policy ended almost random, or almost deterministic without having solved the problems."""
    if ends := becomes_random(log):
        return f"{_change(ends)}, so the policy now chooses its tokens almost at random. {_lower(config)}"
    if (ends := becomes_certain(log)) and (after is None or after.accuracy < 0.9):
        return (
            f"{_change(ends)}, so all completions of a group are alike and there is nothing left to learn from. Lower "
            f"`learning_rate`, which is {config.learning_rate:g}, or raise `temperature` or `beta`."
        )
    return ""


def _change(entropy: tuple[float, float]) -> str:
    return f"The entropy went from {entropy[0]:.2g} to {entropy[1]:.2g} nats per token"


def _accuracy(log: MetricLog, config: GRPOConfig, before: Evaluation | None, after: Evaluation | None) -> str:
    """Whether the held-out accuracy fell by more than chance explains."""
    if before is None or after is None or after.k >= before.k:
        return ""
    p_value = mcnemar(before.correct, after.correct).p_value
    if p_value >= _SIGNIFICANT:
        return ""
    fell = f"The held-out accuracy fell from {before.accuracy:.0%} to {after.accuracy:.0%} (p = {p_value:.2g})"
    first, last = log.ends(REWARD) or (0.0, 0.0)
    if last > first:
        return (
            f"{fell}, although the reward rose from {first:.2f} to {last:.2f}: the reward pays for something other "
            "than correct answers. Read the samples, then correct the reward function."
        )
    return f"{fell}. {_lower(config)}"


def _answers(config: GRPOConfig, before: Evaluation | None, after: Evaluation | None) -> str:
    """Whether almost no answer could be extracted in the last evaluation."""
    last = after or before
    if last is None or (readable := _readable(last)) > _FEW_ANSWERS * last.n:
        return ""
    found = f"An answer could be extracted from only {readable} of {last.n} completions"
    if after is not None and before is not None and _readable(before) > _FEW_ANSWERS * before.n:
        lost = f"and from {_readable(before)} before training, so the policy lost the answer format"
        return f"{found}, {lost}. {_lower(config)}"
    return (
        f"{found}. Read the samples: the prompt may lack the chat template (`prompt_template`), the model may not "
        f"know the format (#### answer), or `max_completion_length` ({config.max_completion_length}) may be too small."
    )


def _cut_off(log: MetricLog, config: GRPOConfig) -> str:
    """Whether more than a tenth of the completions were cut off, at the beginning or at the end."""
    if not (shares := often_cut_off(log)):
        return ""
    return (
        f"{shares[0]:.0%} of the completions were cut off at first and {shares[1]:.0%} in the end, because they "
        f"reached `max_completion_length` = {config.max_completion_length}. They have no answer, so the run teaches "
        f"brevity instead of the task: raise it, to {2 * config.max_completion_length} for example."
    )


def _constant(log: MetricLog) -> str:
    """Whether one of several reward functions paid the same for every completion of the run."""
    constant = [f"{name} ({log.values(f'rewards/{name}/mean')[0]:g})" for name in constant_rewards(log)]
    if not constant:
        return ""
    return (
        f"{', '.join(constant)} paid the same for every completion of the run, so it taught nothing. Try it with "
        "`grpo-edu reward-check`, and read the completions with `grpo-edu show`."
    )


def _lower(config: GRPOConfig) -> str:
    rate = config.learning_rate
    return f"The learning rate is probably too high: lower `learning_rate` from {rate:g} to {rate / 3:.1g}."


def _readable(evaluation: Evaluation) -> int:
    return sum(answer is not None for answer in evaluation.answers)
