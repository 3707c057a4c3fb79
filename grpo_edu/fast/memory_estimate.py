"""Estimate the memory of a training run from the shapes of the model and the settings.

A training process always holds weights, gradients and optimizer states. In addition, each stage of a step needs memory:
first the key-value cache of the rollout, then the activations and logits of a forward and backward pass, then the
temporary tensors of the optimizer step. `estimate_memory` adds the largest of these to the first. All sizes are
products of numbers from the model's config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.chunked_logps import LOGITS_PER_CHUNK
from grpo_edu.fast.memory import GIB

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config

_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
_QWEN2 = {
    "vocab_size": 151936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    **_SPECIAL_TOKENS,
}
# Settings of a Qwen2Config: Qwen/Qwen2-0.5B-Instruct with 494 million parameters, and Qwen2-1.5B with 1,544 million.
SHAPES: dict[str, dict[str, Any]] = {
    "494M": {
        **_QWEN2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    },
    "1.5B": {
        **_QWEN2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    },
}


def shape_config(shape: str | Mapping[str, Any]) -> Qwen2Config:
    """Return the configuration of a Qwen2 model: a name of `SHAPES`, or settings of a `Qwen2Config`.

    The ids of special tokens are those of the tiny model unless the settings contain others, because a shape without
    weights has no tokenizer of its own.

    Raises ValueError: the name is unknown.

    >>> shape_config("494M").num_hidden_layers
    24
    """
    from transformers import Qwen2Config

    if not isinstance(shape, str):
        return Qwen2Config(**{**_SPECIAL_TOKENS, **shape})
    if shape not in SHAPES:
        raise ValueError(f"shape: {shape!r} is unknown; choose one of {', '.join(SHAPES)}")
    return Qwen2Config(**SHAPES[shape])


FLOAT32 = 4  # bytes
# Autograd keeps logits, their softmax and the gradients of both; in chunks they are overwritten.
_LOGIT_COPIES, _CHUNK_COPIES = 4, 1.5
_ENTROPY_COPIES = 2  # an entropy with a gradient needs the softmax and its product with the logits once more
# In addition to the activations, the backward pass of a layer holds gradients about as large as its three MLP tensors.
_GRADIENT_SHARE = 3
_SAMPLING_COPIES = 5  # of a step's logits (B, V) while a token is drawn


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model that determine its memory, in elements per token or in bytes.

    weights, trained, largest: bytes of all weights, of the trained weights, and of the largest trained tensor.
    rows_and_columns: bytes of Adafactor's states for the trained weights.
    element: bytes of one number of the model. layers, hidden, mlp, heads, vocab: as in config.json.
    attention, keys: total widths of all query heads, and of all key heads.
    adapters: whether only adapters are trained. adapter_inputs: bytes per token that the adapters keep.
    eager: whether attention stores its scores.
    """

    weights: int
    trained: int
    largest: int
    rows_and_columns: int
    element: int
    layers: int
    hidden: int
    mlp: int
    heads: int
    vocab: int
    attention: int
    keys: int
    adapters: bool
    adapter_inputs: int
    eager: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """Return the shape of a model, loaded or empty (`empty_model`), with or without adapters."""
        config = model.config.get_text_config()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            weights=sum(weight.nbytes for weight in model.parameters()),
            trained=sum(weight.nbytes for weight in trained),
            largest=max((weight.nbytes for weight in trained), default=0),
            rows_and_columns=sum(_factored_bytes(weight) for weight in trained),
            element=model.dtype.itemsize,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            attention=config.num_attention_heads * head_width,
            keys=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_width,
            adapters=hasattr(model, "peft_config"),
            adapter_inputs=_adapter_input_bytes(model) // config.num_hidden_layers,
            eager=model.config._attn_implementation == "eager",
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes. The first four are needed during the whole run, the others by one stage after another.

    weights: the policy's weights. reference: the frozen copy for a KL term.
    gradients, optimizer: gradients and optimizer states of the trained weights.
    cache: keys and values of the rollout, and the logits from which tokens are sampled.
    activations: tensors that the forward pass keeps for the backward pass. logits: of a chunk's completion tokens.
    scratch: temporary tensors of an optimizer step.
    loading: the weights and, if they are converted, their file. A file with the same dtype is mapped, not copied.
    """

    weights: int
    reference: int
    gradients: int
    optimizer: int
    cache: int
    activations: int
    logits: int
    scratch: int
    loading: int

    @property
    def held(self) -> int:
        """Bytes that are needed from the first step to the last."""
        return self.weights + self.reference + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """The largest number of bytes at one time, without Python's libraries (about 0.5 GiB)."""
        return max(self.held + max(self.cache, self.activations + self.logits, self.scratch), self.loading)

    def __str__(self) -> str:
        """Return one line per part, in GiB."""
        parts = {**asdict(self), "peak": self.peak}
        return "\n".join(f"{name:<12}{size / GIB:7.2f} GiB" for name, size in parts.items())


def estimate_memory(
    model: PreTrainedModel,
    config: GRPOConfig,
    *,
    prompt_length: int,
    completion_length: int | None = None,
    row_length: int | None = None,
    prompts_per_pass: int | None = None,
    file_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate the memory of `grpo_edu.train` from the shapes of its model and batch.

    The peak is that of the model's tensors; Python and its libraries need about 0.5 GiB in addition. For models of the
    Llama family (Qwen, Mistral, SmolLM …) it is within 15% of the measured peak (benchmarks/memory.py); for others it
    is an approximation.

    Args:
        model: a causal language model, loaded or empty (`empty_model`), with or without adapters.
        config: the settings.
        prompt_length: P, tokens per prompt.
        completion_length: C, mean number of tokens per completion; None: `max_completion_length`.
        row_length: tokens of a prompt and its G completions, with common prefixes counted once
            (`grpo_edu.fast.packing`); None: they share only the prompt, P + G · (C − 1).
        prompts_per_pass: groups per micro-batch; None: according to the config.
        file_bytes: size of the weights' file if it has another dtype, for example bfloat16 instead of float32.

    Raises ValueError: a length is below 1.

    >>> from transformers import Qwen2Config
    >>> shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    >>> estimate = estimate_memory(empty_model(Qwen2Config(**shape)), GRPOConfig(), prompt_length=20)
    >>> estimate.gradients == estimate.weights and estimate.optimizer == 2 * estimate.weights
    True
    """
    completion_length = config.max_completion_length if completion_length is None else completion_length
    usual = config.prompts_per_step // config.gradient_accumulation_steps
    groups = usual if prompts_per_pass is None else prompts_per_pass
    width = prompt_length + config.num_generations * (completion_length - 1) if row_length is None else row_length
    for name, value in {
        "prompt_length": prompt_length,
        "completion_length": completion_length,
        "row_length": width,
        "prompts_per_pass": groups,
    }.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    shape = ModelShape.of(model)
    predictions = groups * config.num_generations * completion_length
    return MemoryEstimate(
        **held_bytes(shape, config),
        cache=cache_bytes(shape, config.batch_size, prompt_length + completion_length),
        activations=activation_bytes(shape, groups, width, recompute=config.gradient_checkpointing),
        logits=logits_bytes(shape, config, predictions),
        scratch=2 * shape.largest,
        loading=shape.weights + file_bytes,
    )


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model of a config without values, which needs no memory, for `estimate_memory`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def held_bytes(shape: ModelShape, config: GRPOConfig) -> dict[str, int]:
    """Return the bytes of weights, reference, gradients and optimizer states, under these names."""
    states = shape.rows_and_columns if config.optim == "adafactor" else 2 * shape.trained
    return {
        "weights": shape.weights,
        "reference": shape.weights if config.beta and not shape.adapters else 0,
        "gradients": shape.trained,
        "optimizer": states,
    }


def cache_bytes(shape: ModelShape, rows: int, tokens: int) -> int:
    """Return the bytes of a rollout: keys and values of `rows` sequences of `tokens` tokens, and sampling logits."""
    return rows * (tokens * 2 * shape.layers * shape.keys * shape.element + _SAMPLING_COPIES * shape.vocab * FLOAT32)


def activation_bytes(shape: ModelShape, rows: int, width: int, *, recompute: bool = False) -> int:
    """Return the peak bytes of activations for `rows` packed rows of `width` tokens in one forward and backward pass.

    With `recompute` (gradient checkpointing) every layer keeps only its input, and one layer at a time all activations.
    """
    kept, tokens = layer_bytes(shape), rows * width
    mask = rows * width * width * shape.element
    scores = 2 * shape.heads * mask if shape.eager else 0
    ends = 3 * shape.hidden * FLOAT32
    layer = tokens * kept + scores
    backward = tokens * _GRADIENT_SHARE * shape.mlp * shape.element
    inputs = tokens * shape.hidden * shape.element
    stack = shape.layers * inputs + layer if recompute else shape.layers * layer
    return mask + tokens * ends + stack + backward


def layer_bytes(shape: ModelShape) -> int:
    """Return the bytes per token that one layer keeps for the backward pass.

    With hidden size H, MLP size I, width A of all heads, and e bytes per number, they are e·(4I + 4H + 4A) + 8H if all
    weights are trained. The MLP keeps its gate before and after the activation function, the other branch and their
    product; attention keeps queries, keys, values and its output; the two norms keep their input in float32, their
    normalized input and their output. With frozen weights a linear layer does not keep its input, which leaves
    e·(3I + 4A) + 8H and the inputs of the adapters.
    """
    norms = 2 * shape.hidden * FLOAT32
    if shape.adapters:
        return shape.element * (3 * shape.mlp + 4 * shape.attention) + norms + shape.adapter_inputs
    return shape.element * (4 * shape.mlp + 4 * shape.hidden + 4 * shape.attention) + norms


def logits_bytes(shape: ModelShape, config: GRPOConfig, predictions: int) -> int:
    """Return the peak bytes of logits for `predictions` tokens in one micro-batch (see `grpo_edu.fast.chunked_logps`).

    The gradient of the output layer is computed separately before it is added to the others, so it is counted here.
    """
    chunk = max(1, LOGITS_PER_CHUNK // shape.vocab)
    more = _ENTROPY_COPIES if config.entropy_coef else 0
    logits = predictions * (_LOGIT_COPIES + more) if predictions <= chunk else round(chunk * (_CHUNK_COPIES + more))
    layer = 0 if shape.adapters else shape.vocab * shape.hidden * shape.element
    return predictions * shape.hidden * (shape.element + FLOAT32) + logits * shape.vocab * FLOAT32 + layer


def _factored_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of Adafactor's state: one number per row and column of a matrix, or per entry otherwise."""
    if weight.ndim < 2:
        return weight.nbytes
    return (weight[..., 0].numel() + weight[..., 0, :].numel()) * weight.itemsize


def _adapter_input_bytes(model: PreTrainedModel) -> int:
    """Return the bytes per token of the inputs that all adapters keep.

    In the dtype of the model an input is kept once for all adapters that use it; otherwise each adapter keeps a copy.
    """
    total, seen = 0, set()
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        dtype = next(iter(module.lora_A.values())).weight.dtype
        key = (name.rpartition(".")[0], module.in_features)
        if dtype != model.dtype or key not in seen:
            total += module.in_features * dtype.itemsize
        seen.add(key)
    return total
