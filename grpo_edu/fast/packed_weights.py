"""Sample from a large model with its weights in the layout that oneDNN's products read fastest.

In a decode step a few rows are multiplied by each weight matrix. torch's `linear` then takes much longer than reading
the matrix: at the shape of Qwen2-0.5B and eight rows, several times as long. oneDNN comes with torch and is much
faster once the matrix is stored in blocks of its own layout. Packing takes about as long as two decode steps, and the
copy needs as much memory as the weights, so both are given back after the rollout. The products differ by rounding.

Which number formats can be packed depends on the processor: bfloat16 needs AVX-512 or newer instructions. A rollout in
another format multiplies with the weights as they are; `grpo-edu doctor` says which formats are packed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
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
    dtypes than `packed_dtypes`, with a single row, or with fewer than 16 steps. Nor does it if less than three times
    the memory of the copy is available.

    Args:
        model: a causal language model, whose weights must not change inside the context.
        steps, rows: the largest number of products with each weight matrix, and of their rows.
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
        and layer.weight.dtype in packed_dtypes()
    )


@cache
def packed_dtypes() -> tuple[torch.dtype, ...]:
    """Return the number formats whose weights can be packed on this processor, found once by a product in each."""
    return tuple(dtype for dtype in (torch.float32, torch.bfloat16) if _packs(dtype))


def _packs(dtype: torch.dtype) -> bool:
    """Return True if a packed product of whole numbers, whose sums are exact in both formats, is right."""
    weight = (torch.arange(32 * 32).view(32, 32) % 7 - 3).to(dtype)
    layer = nn.Linear(32, 32, bias=False, device="meta")  # no random weights: the rollout's numbers stay as they are
    layer.weight = nn.Parameter(weight, requires_grad=False)
    inputs = torch.eye(4, 32, dtype=dtype)
    with torch.inference_mode():
        try:
            return torch.equal(_packed_product(layer, len(inputs))(inputs), weight.t()[:4])
        except (RuntimeError, AttributeError):  # this processor, or this build of torch, cannot
            return False


def _packed_product(layer: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    """Return the forward pass of a linear layer with its weights packed for products of about `rows` rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
    return partial(_product, packed, layer.bias)


def _product(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
