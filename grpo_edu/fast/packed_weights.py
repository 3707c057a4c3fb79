"""Sample from a large model with its weights in the layout that oneDNN's products read fastest.

In a decode step a few rows are multiplied by each weight matrix. torch's `linear` then takes much longer than reading
the matrix: at the shape of Qwen2-0.5B and eight rows, several times as long. oneDNN comes with torch and is much
faster once the matrix is stored in blocks of its own layout. Packing takes about as long as two decode steps, and the
copy needs as much memory as the weights, so both are given back after the rollout. The products differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.fast.memory import memory_bytes, replaced_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGE_MATRIX = 2**18  # numbers from which a product costs more than its call; the tiny model's matrices are smaller
_FEWEST_STEPS = 16
_FREE_MEMORY = 3  # times the size of the packed copy that must be available


@contextmanager
def packed_weights(model: PreTrainedModel, rows: int, steps: int, *, active: bool = True) -> Iterator[None]:
    """A context without gradients in which the large linear layers of `model` compute with packed weights.

    Nothing changes where packing does not help: in models without large layers, on other devices than the CPU, in other
    dtypes than float32 and bfloat16, with a single row, or with fewer than 16 steps. Nor does it if less than three
    times the memory of the copy is available.

    Args:
        model: a causal language model, whose weights must not change inside the context.
        rows, steps: at most so many products with each weight matrix, of at most so many rows.
        active: if False, the context does nothing.
    """
    worthwhile = active and rows > 1 and steps >= _FEWEST_STEPS
    layers = [layer for layer in model.modules() if _can_be_packed(layer)] if worthwhile else []
    size = sum(layer.weight.nbytes for layer in layers)
    if size and memory_bytes()[1] < _FREE_MEMORY * size:
        layers = []
    with replaced_forward(layers, lambda layer: _packed_product(layer, rows)):
        yield


def _can_be_packed(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and "forward" not in layer.__dict__
        and layer.weight.numel() >= LARGE_MATRIX
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
    )


def _packed_product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """The forward pass of a linear layer with its weights packed for products of about `rows` rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    return partial(_product, packed, layer.bias)


def _product(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
