"""How much memory a run will need, from the shapes of its model and the settings alone.

A training process holds weights, gradients and optimizer states all the time, and on top of them whatever the stage of
the step needs: the keys and values of the rollout's cache, then the activations and logits of a forward and backward
pass, then what the optimizer needs to make its step. `estimate_memory` adds up the first and takes the largest of the
second; every part is a product of numbers that stand in the model's config.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from grpo_edu.config import GRPOConfig
from grpo_edu.logprobs import LOGITS_PER_CHUNK
from grpo_edu.memory import GIB

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLOAT32 = 4  # bytes
# Logits that autograd handles are there with their softmax and the gradients of both; in chunks they are written over.
_LOGIT_COPIES, _CHUNK_COPIES = 4, 1.5
# A layer's backward pass holds, beside what the forward pass left, gradients about as large as its three MLP tensors.
_GRADIENT_SHARE = 3
_SAMPLING_COPIES = 5  # of a step's logits (B, V) while a token is drawn


@dataclass(frozen=True)
class ModelShape:
    """What of a causal language model decides its memory; sizes are elements a token unless they are bytes.

    weights, trained, largest: bytes of all weights, of those that learn, and of the largest tensor that learns.
    rows_and_columns: bytes that Adafactor keeps of the weights that learn.
    element: bytes of one number of the model. layers, hidden, mlp, heads, vocab: as in config.json.
    attention, keys: widths of all query heads, and of all key heads, together.
    adapters: whether the weights are frozen but for adapters. adapter_inputs: bytes a token that the adapters keep.
    eager: whether attention writes its scores out.
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
        """Read the shape of a model, loaded or empty (`empty_model`), with adapters or without."""
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
    """Bytes, part by part. The first four are held during the whole run, the others by one stage after another.

    weights: of the policy. reference: of the frozen copy that a KL term compares with.
    gradients, optimizer: of the weights that learn.
    cache: keys and values of the rollout, with the logits that tokens are drawn from.
    activations: what the forward pass keeps for the backward pass. logits: of the completion tokens in one chunk.
    scratch: what an optimizer step needs for a moment.
    loading: of the weights and, where they are converted, of the file that they are read from. A file with the weights'
        own dtype is mapped, not copied.
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
        """Bytes that are there from the first step to the last."""
        return self.weights + self.reference + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """Bytes at the worst moment, of a step or before the first, without Python's libraries (about 0.5 GiB)."""
        return max(self.held + max(self.cache, self.activations + self.logits, self.scratch), self.loading)

    def __str__(self) -> str:
        """One part a line, in GiB."""
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
    """What a run of `grpo_edu.train` needs, by the shapes of its model and batch.

    The peak is that of the model's tensors; a process has Python and its libraries beside (about 0.5 GiB). For models
    of the Llama family (Qwen, Mistral, SmolLM …) it is within 15% of what was measured (benchmarks/memory.py); for
    others it is an approximation.

    Args:
        model: a causal language model, loaded or empty (`empty_model`), with adapters or without.
        config: the settings.
        prompt_length: P, tokens of a prompt.
        completion_length: C, mean tokens of a completion; None: the most that the config allows.
        row_length: tokens of a prompt and its G completions, common beginnings counted once (`grpo_edu.packing`);
            None: they share nothing but the prompt, P + G · (C − 1).
        prompts_per_pass: groups in one forward pass; None: as the config cuts the batch.
        file_bytes: of the file that the weights are loaded from where it has another dtype, bfloat16 for float32 say.

    Raises:
        ValueError: a length below 1.

    >>> from transformers import Qwen2Config
    >>> shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=500)
    >>> estimate = estimate_memory(empty_model(Qwen2Config(**shape)), GRPOConfig(), prompt_length=20)
    >>> estimate.gradients == estimate.weights and estimate.optimizer == 2 * estimate.weights
    True
    """
    completion_length = config.max_completion_length if completion_length is None else completion_length
    groups = (
        config.prompts_per_step // config.gradient_accumulation_steps if prompts_per_pass is None else prompts_per_pass
    )
    width = prompt_length + config.num_generations * (completion_length - 1) if row_length is None else row_length
    for name, value in {
        "prompt_length": prompt_length, "completion_length": completion_length, "row_length": width,
        "prompts_per_pass": groups,
    }.items():  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}: {value} must be at least 1")
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
    """The model that a config describes, without its numbers: it takes no memory, and serves `estimate_memory`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def held_bytes(shape: ModelShape, config: GRPOConfig) -> dict[str, int]:
    """Bytes of weights, reference, gradients and optimizer, by these names."""
    states = shape.rows_and_columns if config.optim == "adafactor" else 2 * shape.trained
    return {
        "weights": shape.weights,
        "reference": shape.weights if config.beta and not shape.adapters else 0,
        "gradients": shape.largest if config.optimizer_in_backward else shape.trained,
        "optimizer": states,
    }


def cache_bytes(shape: ModelShape, rows: int, tokens: int) -> int:
    """Bytes of a rollout: keys and values of `rows` sequences of `tokens` tokens, and the logits to draw from."""
    return rows * (tokens * 2 * shape.layers * shape.keys * shape.element + _SAMPLING_COPIES * shape.vocab * FLOAT32)


def activation_bytes(shape: ModelShape, rows: int, width: int, *, recompute: bool = False) -> int:
    """Bytes of activations at their peak, for `rows` packed rows of `width` tokens in one forward and backward pass.

    With `recompute` (gradient checkpointing) every layer keeps its input alone, and one layer at a time all of it.
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
    """Bytes that one layer keeps of one token for the backward pass.

    With H the hidden size, I that of the MLP, A the width of all heads, and e bytes a number:
    e·(4I + 4H + 4A) + 8H when all weights learn. The MLP keeps its gate before and after the activation function, the
    other branch and their product; attention keeps queries, keys, values and its output; the two norms keep their
    input in float32, what they divide it to, and their output.
    With frozen weights, a linear layer needs its input no longer: e·(3I + 4A) + 8H, and what the adapters keep.
    """
    norms = 2 * shape.hidden * FLOAT32
    if shape.adapters:
        return shape.element * (3 * shape.mlp + 4 * shape.attention) + norms + shape.adapter_inputs
    return shape.element * (4 * shape.mlp + 4 * shape.hidden + 4 * shape.attention) + norms


def logits_bytes(shape: ModelShape, config: GRPOConfig, predictions: int) -> int:
    """Bytes of logits at their peak, for so many predicted tokens in one pass (see `grpo_edu.chunked_logps`).

    The gradient that they have for the output layer is made whole before it joins the others, so it counts here; where
    the step is in the backward pass it is the one gradient that is there.
    """
    chunk = max(1, LOGITS_PER_CHUNK // shape.vocab)
    logits = predictions * _LOGIT_COPIES if predictions <= chunk else round(chunk * _CHUNK_COPIES)
    learns_here = not shape.adapters and not config.optimizer_in_backward
    layer = shape.vocab * shape.hidden * shape.element if learns_here else 0
    return predictions * shape.hidden * (shape.element + FLOAT32) + logits * shape.vocab * FLOAT32 + layer


def _factored_bytes(weight: torch.Tensor) -> int:
    """Bytes of Adafactor's state: a number a row and a column of a matrix, a number an entry of anything else."""
    if weight.ndim < 2:
        return weight.nbytes
    return (weight[..., 0].numel() + weight[..., 0, :].numel()) * weight.itemsize


def _adapter_input_bytes(model: PreTrainedModel) -> int:
    """Bytes a token that all adapters together keep: their inputs.

    In the model's own type an input is kept once for all adapters that read it; in another type each has its own copy.
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
