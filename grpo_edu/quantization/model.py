"""Quantized copies of a model for sampling and serving: a quarter of the memory, and more speed where it is large.

How much faster a copy is depends on the processor: see `grpo_edu.quantization.layers` for those without instructions
for int8. `quantize_model` makes a copy with integer matrices and leaves the original as it was. The arithmetic is in
`grpo_edu.quantization.numbers`, and the layers are in `grpo_edu.quantization.layers`.

========================  =================================================  ====================================
scheme                    weights                                            activations
========================  =================================================  ====================================
bf16                      bfloat16, all of them                              bfloat16
int8-dynamic              int8, per-channel scales                           int8, one scale per row of the input
int8-weight               int8, per-channel scales                           float
int4-group                4 bits, scale and zero point per 32 neighbors      float
int4-tensor               4 bits, one scale per matrix                       float
========================  =================================================  ====================================

The output layer and the embedding table are int8 in all schemes but the first: they have half of a small model's
weights, and the probabilities of the tokens are computed from them. "int4-tensor" is a bad example, for studies of what
too coarse a copy does to training. It is not one of `QUANTIZATION_SCHEMES`, and it keeps its 4 bits in bytes, so it
needs as much memory as int8.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from grpo_edu.config import ROLLOUT_SCHEMES
from grpo_edu.quantization.layers import (
    DynamicInt8Linear,
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    QuantizedLayer,
    int4_obstacle,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def quantize_model(model: PreTrainedModel, scheme: str, *, embeddings: bool = True) -> PreTrainedModel:
    """Return a copy of a model in a smaller number format, for inference; the model itself is left as it was.

    The copy samples (`generate`, `evaluate`) and scores (`per_token_logps`) as any model does. It cannot learn: the
    steps of a training are far smaller than those of its grid.

    Args:
        model: a causal language model of transformers in float32 or bfloat16.
        scheme: one of `grpo_edu.config.ROLLOUT_SCHEMES`, see the table above.
        embeddings: int8 for the table of embeddings too; False keeps it as it is, as `torch.ao` and most tools do.
            With "bf16" there is no choice.

    Returns:
        The copy in eval mode, without gradients; `quantization_scheme` tells its scheme.

    Raises:
        ValueError: an unknown scheme; a model that is quantized already, carries adapters, has no linear layers, or
            has one whose shape the kernel does not take; weights that are not finite.

    Warns:
        RuntimeWarning: this processor has no kernel for the scheme, or none for a layer's shape, so that the copy is
            small, but slow.
    """
    _check(model, scheme)
    if scheme == "bf16":
        small = copy.deepcopy(model).to(torch.bfloat16)
    else:
        table = model.get_input_embeddings().weight
        shared = {id(layer.weight): layer.weight for layer in _linear_layers(model).values()}
        if embeddings:
            shared[id(table)] = table
        else:
            shared.pop(id(table), None)
        small = copy.deepcopy(model, shared)  # what gets replaced is not copied before
        _replace_layers(small, scheme, embeddings=embeddings)
    small.quantization_scheme = scheme
    return small.requires_grad_(False).eval()


def quantization_scheme(model: nn.Module) -> str | None:
    """Return the scheme that `quantize_model` made a model in; None for any other model."""
    return getattr(model, "quantization_scheme", None)


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors that a file of the model contains, by name and each once, ready for safetensors."""
    tensors: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():  # a module that occurs twice is named once
        for name, tensor in _own_tensors(module).items():
            if id(tensor) not in seen:
                seen[id(tensor)] = tensor
                tensors[f"{prefix}.{name}"] = tensor.detach().contiguous()
    return tensors


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of one module without those of its children."""
    if isinstance(module, QuantizedLayer):
        return module.store()
    buffers = dict(module.named_buffers(recurse=False))
    saved = {name: buffer for name, buffer in buffers.items() if name not in module._non_persistent_buffers_set}
    return {**dict(module.named_parameters(recurse=False)), **saved}


def stored_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a model's tensors, in memory and on disk."""
    return sum(tensor.nbytes for tensor in stored_tensors(model).values())


def _linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}


def _replace_layers(model: PreTrainedModel, scheme: str, *, embeddings: bool) -> None:
    """Replace the linear layers, and the embedding table if wanted, by quantized ones."""
    make = {
        "int8-dynamic": DynamicInt8Linear,
        "int8-weight": Int8Linear.of,
        "int4-group": Int4Linear,
        "int4-tensor": Int8Linear.with_4_bits_per_tensor,
    }[scheme]
    table, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    rows = Int8Embedding(table) if embeddings else None
    for name, layer in _linear_layers(model).items():
        if layer is not output:
            quantized = make(layer)
        elif scheme == "int8-dynamic":
            quantized = DynamicInt8Linear(layer)
        else:
            shared = rows if layer.weight is table else None
            quantized = Int8Linear(Int8Embedding(layer.weight) if shared is None else shared, layer.bias)
        model.set_submodule(name, quantized)
    if rows is not None:
        model.set_input_embeddings(rows)
    for parameter in model.parameters():  # norms
        parameter.data = parameter.data.float()


def _check(model: PreTrainedModel, scheme: str) -> None:
    if scheme not in ROLLOUT_SCHEMES:
        raise ValueError(f"scheme: {scheme!r} is unknown; choose one of {', '.join(ROLLOUT_SCHEMES)}")
    if quantization_scheme(model) is not None:
        raise ValueError(
            f"model is already quantized ({quantization_scheme(model)}), and rounding twice only adds error; quantize "
            "the original"
        )
    if hasattr(model, "peft_config"):
        raise ValueError("model has adapters; quantize model.merge_and_unload() instead")
    output = model.get_output_embeddings()
    layers = _linear_layers(model)
    if not any(layer is not output for layer in layers.values()):
        raise ValueError(f"model: {type(model).__name__} has no nn.Linear layers, so there is nothing to quantize")
    if scheme == "int4-group":
        for name, layer in layers.items():
            obstacle = "" if layer is output else int4_obstacle(layer)
            if obstacle:
                raise ValueError(f"model: the int4 kernel cannot be used for {name} ({obstacle}); use 'int8-weight'")
