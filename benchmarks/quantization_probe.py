"""Which quantization scheme samples fastest on this computer: a decode step is timed in float32 and in each scheme.

The answer depends on the number of rows. With one row, reading the weights from memory takes most of the time, so the
smallest format is the fastest. With more rows the arithmetic counts, and a kernel that converts every weight back to
float32 before it multiplies falls behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from grpo_edu.config import QUANTIZATION_SCHEMES
from grpo_edu.machine.probe import shallow_model
from grpo_edu.quantization.model import quantize_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class SchemeProbe:
    """Seconds of a decode step of `rows` rows, estimated for the whole model; "float32" stands for no scheme."""

    rows: int
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The scheme with the shortest step, or "float32"."""
        return min(self.seconds, key=self.seconds.__getitem__)

    def __str__(self) -> str:
        base = self.seconds["float32"]
        speeds = ", ".join(f"{name} {base / seconds:.1f}" for name, seconds in self.seconds.items())
        return f"times as fast as float32 with {self.rows} rows: {speeds}; fastest: {self.fastest}"


def probe_schemes(
    config: PretrainedConfig, *, rows: int = 8, schemes: Sequence[str] = QUANTIZATION_SCHEMES, repeats: int = 5
) -> SchemeProbe:
    """Time two layers and the output layer of an architecture in float32 and in each scheme, in turn.

    Args:
        config: config of a causal language model of transformers (`models.load_config`).
        rows: completions that are decoded together.
        schemes: those to try, of `QUANTIZATION_SCHEMES`.
        repeats: timings of each; their median counts.

    Raises:
        ValueError: `rows` or `repeats` below 1; what `quantize_model` refuses.
    """
    for name, value in {"rows": rows, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, got {value}")
    model = shallow_model(config, torch.float32)
    layers = config.get_text_config().num_hidden_layers
    models = {"float32": model, **{scheme: quantize_model(model, scheme) for scheme in schemes}}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, candidate in models.items():
                found = _step_seconds(candidate, rows, layers)
                if repeat:  # the first is the warm-up
                    seconds[name].append(found)
    return SchemeProbe(rows, {name: statistics.median(values) for name, values in seconds.items()})


def _step_seconds(model: PreTrainedModel, rows: int, layers: int) -> float:
    """Return the seconds of one decode step; the layers that are there count for all of them."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    started = time.perf_counter()
    hidden = decoder(input_ids=torch.zeros(rows, 1, dtype=torch.long), use_cache=False).last_hidden_state
    passed = time.perf_counter()
    head(hidden)
    return (passed - started) * layers / len(decoder.layers) + time.perf_counter() - passed
