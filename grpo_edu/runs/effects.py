"""Which options need others to have an effect: one table, and the error for an option that would change nothing.

An option that was typed and changes nothing is an error, because whoever typed it believes the opposite. `RUN_NEEDS`
has the options of a training run; a command with options of its own adds rows (`grpo_edu.continual.stages`,
`grpo_edu.cli`). Needs no torch, so that the command line reads the table at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class OptionRequirement:
    """The requirement for some options to have an effect.

    options: their names, with blanks. holds: settings of the whole run → whether they have one.
    remedy: what they need, for the message, with the names of settings in backticks.
    """

    options: str
    holds: Callable[[Settings], bool]
    remedy: str


def _moves_between_updates(settings: Settings) -> bool:
    """Return True if a step has several updates, so that the policy is another one in the later ones."""
    return settings["num_iterations"] > 1


def _is_clipped(settings: Settings) -> bool:
    """Return True if ratios can differ from 1, in a loss whose clip bounds are 1 − ε and 1 + ε."""
    return _moves_between_updates(settings) and _loss(settings).clips == "ratio"


def _loss(settings: Settings) -> Any:
    """Return the entry of the loss type."""
    from grpo_edu.losses import LOSSES  # imports torch

    return LOSSES[settings["loss_type"]]


def _scales(settings: Settings) -> bool:
    """Return True if the estimator of the advantages scales rewards."""
    from grpo_edu.advantages import ESTIMATORS  # imports torch

    return ESTIMATORS[settings["advantage_estimator"]].scales


def _tokens_differ(settings: Settings) -> bool:
    """Return True if one ratio per completion and one per token have different gradients.

    Where every ratio is 1 their gradients add up to the same, unless something else weights the tokens differently.
    """
    if not _loss(settings).uses_ratio:
        return bool(settings["beta"] and settings["use_bias_correction_kl"])
    return (
        _moves_between_updates(settings)
        or bool(_samples_differ(settings) and settings["importance_sampling_correction"])
        or bool(settings["beta"] and settings["use_bias_correction_kl"])
    )


def _samples_differ(settings: Settings) -> bool:
    """Return True if another policy samples than the one that is trained."""
    return settings["rollout_quantization"] is not None or settings["rollout_lag"] > 0


# In a run, every other option has an effect whatever the others are. A new option that needs another gets a row here.
RUN_NEEDS: tuple[OptionRequirement, ...] = (
    OptionRequirement("lora_alpha lora_targets", lambda run: run["lora_rank"] > 0, "`lora_rank` above 0"),
    OptionRequirement(
        "scale_rewards",
        lambda run: _scales(run) or run["scale_rewards"] == "none",
        "`advantage_estimator` group, because the others do not scale rewards",
    ),
    OptionRequirement(
        "epsilon", _is_clipped, "`num_iterations` of at least 2, and a `loss_type` with clip bounds such as grpo"
    ),
    OptionRequirement(
        "epsilon_high",
        lambda run: _loss(run).clips == "weight" or _is_clipped(run),
        "`num_iterations` of at least 2 and a `loss_type` with clip bounds such as grpo, or `loss_type` cispo",
    ),
    OptionRequirement(
        "importance_sampling_level",
        _tokens_differ,
        "`num_iterations` of at least 2 and a `loss_type` with a ratio, because in the first update every ratio is 1",
    ),
    OptionRequirement("use_bias_correction_kl", lambda run: run["beta"] > 0, "`beta` above 0"),
    OptionRequirement(
        "importance_sampling_correction importance_sampling_clip_max",
        _samples_differ,
        "`rollout_quantization` or `rollout_lag`",
    ),
    OptionRequirement(
        "importance_sampling_clip_max",
        lambda run: run["importance_sampling_correction"],
        "`importance_sampling_correction`",
    ),
    OptionRequirement(
        "lr_scheduler_type",
        lambda run: run["lr_scheduler_type"] != "constant_with_warmup" or run["warmup_steps"] > 0,
        "`warmup_steps` above 0",
    ),
    OptionRequirement(
        "system_prompt num_examples chat_template_kwargs",
        lambda run: run["prompt_template"] is None,
        "the model's chat template, and `prompt_template` takes its place",
    ),
    OptionRequirement("abort_grad_norm", lambda run: run["backend"] == "grpo_edu", "`backend` grpo_edu"),
)


def reject_ineffective_options(
    given: Settings, settings: Settings, needs: Sequence[OptionRequirement] = RUN_NEEDS
) -> None:
    """Raise ValueError for an option that was given and has no effect next to the settings of the whole run.

    The error names the option and what it needs. An option that is False requires nothing.

    >>> needs = [OptionRequirement("strength", lambda run: run["method"] != "none", "`method`")]
    >>> reject_ineffective_options({"strength": 50}, {"method": "none"}, needs)
    Traceback (most recent call last):
    ...
    ValueError: `strength` is 50, which has no effect here: it needs `method`. Change that, or leave `strength` out.
    """
    for need in needs:
        for name in need.options.split():
            if name in given and given[name] is not False and not need.holds(settings):
                raise ValueError(
                    f"`{name}` is {given[name]}, which has no effect here: it needs {need.remedy}. Change that, or "
                    f"leave `{name}` out."
                )
