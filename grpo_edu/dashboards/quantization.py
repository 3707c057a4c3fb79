"""A real weight matrix under fewer bits: its histogram, its error, its size, and what a product takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import ipywidgets as widgets
import torch
from torch import Tensor, nn

from grpo_edu.dashboards.base import Explorer, choice, say_html, slider
from grpo_edu.figures.style import LEGEND, look, panel_grid, style_axes
from grpo_edu.problems.templates import data_dir
from grpo_edu.quantization.layers import DynamicInt8Linear, Int8Linear
from grpo_edu.quantization.numbers import QuantizedTensor, quantize, relative_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

_MATRICES = (  # of a layer, in the model's order
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_SCALES = ("per tensor", "per row", "per group of 32")


class QuantizationExplorer(Explorer):
    """Bits, symmetric or affine, and how far a scale reaches, on a weight matrix of a real model.

    Args:
        model: a causal language model; the tiny one where left out.

    >>> from torch import nn
    >>> explorer = QuantizationExplorer(nn.Sequential(nn.Linear(32, 16)))
    >>> explorer.bits.value = 2
    >>> explorer.error() > 0.1
    True
    """

    def __init__(self, model: PreTrainedModel | nn.Module | None = None) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be a loaded model, got {model!r}; load it with load_policy")
        self.weights = (
            tiny_weights()
            if model is None
            else {
                name: layer.weight.detach().float()
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear)
            }
        )
        self.bits = slider(widgets.IntSlider, "bits", 8, 2, 8, 1, "per stored number")
        self.kind = choice("Grid", ("symmetric", "affine"), "with zero in the middle, or from smallest to largest")
        self.scales = choice("Scale", _SCALES, "how many numbers share a scale")
        self.matrix = choice("Matrix", self.weights, "a weight of the model")
        self.measure = widgets.Button(description="Time a product", tooltip="float32 against the int8 kernels")
        self.measure.on_click(self._measure)
        self.timed = widgets.HTML()
        self.timed.add_class("grpo-edu-message")
        controls = [self.matrix, self.bits, self.kind, self.scales, self.measure, self.timed]
        super().__init__(
            "Quantization", controls, "With fewer bits the grid is coarser, the error larger and the file smaller."
        )

    def weight(self) -> Tensor:
        """Return the chosen matrix."""
        return self.weights[self.matrix.value]

    def quantized(self) -> QuantizedTensor:
        """Return the chosen matrix on the chosen grid."""
        where = {"per row": {"dim": 0}, "per group of 32": {"group_size": 32}}.get(self.scales.value, {})
        return quantize(self.weight(), bits=self.bits.value, symmetric=self.kind.value == "symmetric", **where)

    def error(self) -> float:
        """Return the relative error of the matrix."""
        return relative_error(self.weight(), self.quantized().dequantize())

    def stored(self) -> float:
        """Return the bytes of the numbers at their bits, and of float32 scales and, on an affine grid, zero points."""
        parts = self.quantized()
        affine = self.kind.value == "affine"
        return parts.q.numel() * self.bits.value / 8 + 4 * parts.scale.numel() * (1 + affine)

    def draw(self) -> tuple[Figure, str]:
        """Draw the weights before and after (left) and the rounding error (right)."""
        weight = self.weight()
        after = self.quantized().dequantize()
        figure, (left, right) = panel_grid(2, height=3.0)
        style_axes(left, "Weights", "numbers", "value")
        style_axes(right, "Error", "numbers", "value after − before")
        filled = {"bins": 80, "histtype": "stepfilled"}  # one outline, drawn faster than 80 bars
        left.hist(weight.flatten().numpy(), color=look(0)["color"], label="float32", **filled)
        left.hist(after.flatten().numpy(), bins=80, histtype="step", color=look(1)["color"], label="on the grid")
        left.legend(loc="upper left", **LEGEND)
        right.hist((after - weight).flatten().numpy(), color=look(2)["color"], **filled)
        return figure, (
            f"Histogram of {self.matrix.value} at {self.bits.value} bits, {self.kind.value}, {self.scales.value}: "
            f"relative error {self.error():.2%}"
        )

    def words(self) -> str:
        """Error and size."""
        before, after = 4 * self.weight().numel(), self.stored()
        return (
            f"Relative error {self.error():.2%}. {before:,} → {after:,.0f} bytes, {before / after:.1f} times smaller."
        )

    def _measure(self, button: object = None) -> None:
        """Microseconds of one product of a row with the matrix, the median of 50."""
        layer = nn.Linear(self.weight().shape[1], self.weight().shape[0], bias=False)
        layer.weight.data.copy_(self.weight())
        x = torch.ones(8, self.weight().shape[1])
        layers = {"float32": layer, "int8-dynamic": DynamicInt8Linear(layer), "int8-weight": Int8Linear.of(layer)}
        self.times = {name: _median_seconds(module, x) for name, module in layers.items()}
        self.timed.value = say_html(", ".join(f"{name} {1e6 * seconds:.0f} µs" for name, seconds in self.times.items()))


def tiny_weights() -> dict[str, Tensor]:
    """Return the matrices of the tiny model's layers from its file, which is read in a moment, unlike the whole model.

    >>> next(iter(tiny_weights()))
    'model.layers.0.self_attn.q_proj'
    """
    from safetensors.torch import load_file

    stored = load_file(data_dir() / "models" / "tiny" / "model.safetensors")
    named = {name.removesuffix(".weight"): weight.float() for name, weight in stored.items()}
    layers = sorted({int(name.split(".")[2]) for name in named if name.startswith("model.layers.")})
    names = [f"model.layers.{layer}.{part}" for layer in layers for part in _MATRICES]
    return {name: named[name] for name in names} | {"lm_head": named["model.embed_tokens"]}  # one matrix for both


def _median_seconds(module: nn.Module, x: Tensor) -> float:
    seconds = []
    with torch.no_grad():
        for _ in range(50):
            started = time.perf_counter()
            module(x)
            seconds.append(time.perf_counter() - started)
    return sorted(seconds)[25]
