"""Warn of a run that did not learn or became worse: `grpo_edu.runs.log_diagnosis` with the settings of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from grpo_edu.config import GRPOConfig
from grpo_edu.runs.log_diagnosis import Finding, find
from grpo_edu.runs.measures import Measures, RunFacts

_LARGEST_SAMPLE = 4096  # weights of one tensor that are looked at
_FEW_WEIGHTS = 0.001  # share of the weights
_MAX_EVIDENCE, _MAX_CAUSES = 4, 2  # of a warning


def find_symptoms(history: Sequence[Mapping[str, float]], facts: RunFacts) -> list[str]:
    """Return warnings about a run that did not learn, or became worse; each names the likely causes and remedies.

    history: the metrics of each step. facts: settings and evaluations of the run.

    >>> step = {"reward": 0.0, "grad_norm": 0.0, "frac_reward_zero_std": 1.0, "entropy": 0.2}
    >>> print(find_symptoms([step, step], RunFacts(GRPOConfig()))[0][:31])
    The reward is 0, or close to it
    """
    said: set[str] = set()  # causes that an earlier warning names
    return [_write_warning(finding, facts.config, said) for finding in find(Measures(history, facts))]


def _write_warning(finding: Finding, config: GRPOConfig | None, said: set[str]) -> str:
    evidence = "; ".join(finding.evidence[:_MAX_EVIDENCE])
    causes = [f"{cause.what} {cause.remedy}" for cause in finding.causes[:_MAX_CAUSES]]
    causes = [cause for cause in causes if cause not in said]
    said.update(causes)
    advice = " Or: ".join(causes)
    text = f"{finding.sees.removesuffix('.')}: {evidence}. {advice}".strip()
    return text if config is None else _add_values(text, config)


def _add_values(text: str, config: GRPOConfig) -> str:
    """Return a text in which the value follows each setting that it names, in place of its name in verl."""
    settings = config.to_dict()

    def add(match: re.Match[str]) -> str:
        value = settings.get(match[1])
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return f"`{match[1]}` (now {value:g})" if is_number and match[2] is None else f"`{match[1]}`{match[2] or ''}"

    return re.sub(r"`([a-z_]+)`( (?:is|=) (?=\d))?", add, re.sub(r" \(in verl `[a-z_]+`\)", "", text))


def sample_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of some weights of every tensor that is trained, for `unchanged`; at most 16 KB per tensor."""
    with torch.no_grad():
        return {name: _some(weight).clone() for name, weight in model.named_parameters() if weight.requires_grad}


def unchanged(model: nn.Module, sample: Mapping[str, Tensor]) -> bool:
    """Return True if almost no weight differs from a sample by more than the rounding of its number format."""
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
