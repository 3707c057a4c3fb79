"""Find out whether float32 or bfloat16 is faster on this computer, by timing layers of the model in both formats.

bfloat16 halves the memory of the weights. Whether it is also faster depends on the computer: with bfloat16 instructions
(avx512_bf16, amx_bf16) a large model can be several times as fast, and without them it becomes slower. A small model
may be slower on any computer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_edu.config import DTYPE_CHOICES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = ("float32", "bfloat16")
_ROWS, _CONTEXT = 8, 32  # a decode step of 8 rows, and a forward over one row of 8 · 32 tokens
_TRUSTED = 0.9  # bfloat16 must take less than this share of float32's time to be worth its rounding


@dataclass(frozen=True)
class DtypeProbe:
    """Seconds per number format, estimated for the whole model from two of its layers and its output layer.

    decode: one decoding step of a rollout with 8 rows. forward: a forward pass over 256 tokens.
    """

    decode: dict[str, float]
    forward: dict[str, float]

    @property
    def faster(self) -> str:
        """The format in which a rollout is faster; float32 unless bfloat16 saves at least a tenth of the time."""
        gain = self.decode["bfloat16"] < _TRUSTED * self.decode["float32"]
        return "bfloat16" if gain else "float32"

    def __str__(self) -> str:
        speed = {part: seconds["float32"] / seconds["bfloat16"] for part, seconds in vars(self).items()}
        return (
            f"bfloat16 is {speed['decode']:.2g} times as fast as float32 here in a rollout, "
            f"{speed['forward']:.2g} times in a forward"
        )


def probe_dtypes(config: PretrainedConfig, *, repeats: int = 3) -> DtypeProbe:
    """Time two layers and the output layer of an architecture in each number format; takes a second or two.

    No weights are loaded, because the time of a matrix product does not depend on its numbers.

    Args:
        config: config of a causal language model of transformers (`models.load_config`).
        repeats: how often each part is timed in each format; the median is reported.

    Raises:
        ValueError: `repeats` below 1, or an architecture without a plain causal language model.
    """
    if repeats < 1:
        raise ValueError(f"repeats: must be at least 1, got {repeats}")
    calls = {dtype: _parts(config, getattr(torch, dtype)) for dtype in DTYPES}
    seconds: dict[tuple[str, str], list[float]] = {}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for dtype, parts in calls.items():
                for name, (call, times) in parts.items():
                    started = time.perf_counter()
                    call()
                    if repeat:  # the first is the warm-up
                        seconds.setdefault((name, dtype), []).append((time.perf_counter() - started) * times)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    decode, forward = (
        {dtype: medians[f"{part} layers", dtype] + medians[f"{part} head", dtype] for dtype in DTYPES}
        for part in ("decode", "forward")
    )
    return DtypeProbe(decode, forward)


def _parts(config: PretrainedConfig, dtype: torch.dtype) -> dict:
    """Functions to time, each with the number of times that the whole model runs it."""
    model = shallow_model(config, dtype)
    layers = config.get_text_config().num_hidden_layers
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    width = head.weight.shape[1]
    token = torch.zeros(_ROWS, 1, dtype=torch.long)
    row = torch.zeros(1, _ROWS * _CONTEXT, dtype=torch.long)
    deep = layers / min(2, layers)
    return {
        "decode layers": (lambda: decoder(input_ids=token, use_cache=False), deep),
        "decode head": (lambda: head(torch.zeros(_ROWS, width, dtype=dtype)), 1),
        "forward layers": (lambda: decoder(input_ids=row, use_cache=False), deep),
        "forward head": (lambda: head(torch.zeros(_ROWS, width, dtype=dtype)), _CONTEXT),
    }


def shallow_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model whose weights are all zero, with the first two layers of an architecture, for timing."""
    import copy

    from transformers import AutoModelForCausalLM

    shallow = copy.deepcopy(config)
    shallow.get_text_config().num_hidden_layers = min(2, config.get_text_config().num_hidden_layers)
    if getattr(shallow.get_text_config(), "layer_types", None):
        shallow.get_text_config().layer_types = shallow.get_text_config().layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shallow, dtype=dtype)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def choose_dtype(asked: str, model: str | Path, *, trains_weights: bool) -> tuple[str, str]:
    """Choose the number format for a policy; returns it with a sentence that gives the reason (empty for "float32").

    "auto" times both formats and chooses the faster one, except when the weights themselves are trained. A bfloat16
    weight loses every update smaller than about 1/256 of its size, so float32 is chosen then.

    Args:
        asked: "float32", "bfloat16" or "auto".
        model: as for `load_policy`.
        trains_weights: whether the weights that are loaded are trained (they are not in an evaluation or with LoRA).

    Raises:
        ValueError: `asked` is another word; or as for `load_config`.
    """
    if asked not in DTYPE_CHOICES:
        raise ValueError(f"dtype: {asked!r} is unknown; choose one of {', '.join(DTYPE_CHOICES)}")
    if asked == "float32":
        return asked, ""
    from grpo_edu.models import load_config

    probe = probe_dtypes(load_config(model))
    if asked == "bfloat16":
        swallowed = "; small updates of its weights will be lost to rounding" if trains_weights else ""
        return asked, f"{probe}{swallowed}"
    if trains_weights and probe.faster == "bfloat16":
        return "float32", f"{probe}; using float32 nevertheless, because bfloat16 weights lose small updates"
    return probe.faster, f"{probe}; using {probe.faster}"
