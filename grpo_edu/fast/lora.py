"""LoRA with peft: train a small correction of frozen weights, and get the reference policy at no extra memory cost.

Hu et al. 2021, https://arxiv.org/abs/2106.09685: a frozen matrix W (out, in) is replaced by W + (alpha / rank) · B A
with trained matrices A (rank, in) and B (out, rank). B starts at zero, so the first policy is the base model. About a
hundredth of the weights is trained, so gradients and optimizer states are small too. Because the base model does not
change, the reference policy of a KL term is the same model with its adapters disabled, without a second copy.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_lora(
    model: PreTrainedModel,
    *,
    rank: int = 16,
    alpha: float | None = None,
    target_modules: str | Sequence[str] = "all-linear",
) -> PeftModel:
    """Freeze a model and add LoRA adapters to its linear layers; returns the model to train.

    The layers of `model` itself are replaced, so use only the returned model. Adapters of a bfloat16 model are in
    float32, so that small updates are not lost by rounding. There is no dropout, so that the policy that is trained is
    the policy that sampled.

    LoRA needs about ten times the learning rate of full fine-tuning ("LoRA Without Regret", 2025,
    https://thinkingmachines.ai/blog/lora/).

    Args:
        model: a causal language model of transformers.
        rank: r >= 1.
        alpha: the correction is scaled by alpha / rank; None: twice the rank.
        target_modules: "all-linear" (all except the output layer), or names such as ["q_proj", "v_proj"].

    Raises ValueError: the rank is below 1, the model already has adapters, or no layer has one of the names.
    """
    from peft import LoraConfig, get_peft_model

    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if has_adapters(model):
        raise ValueError("model already has adapters; merge them first with merge_lora")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    if isinstance(targets, list):
        _check_targets(model, targets)
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with _quiet_peft():
        return get_peft_model(model, settings).eval()


def _check_targets(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError, with the names of the linear layers, if no layer has one of these names."""
    layers = [f".{name}" for name, _ in model.named_modules()]
    for name in names:
        if not any(layer.endswith(f".{name}") for layer in layers):
            linear = {key.rpartition(".")[2] for key, part in model.named_modules() if isinstance(part, nn.Linear)}
            raise ValueError(
                f"`target_modules`: no layer is called {name!r}; choose from {', '.join(sorted(linear))}, or take "
                "'all-linear'."
            )


def merge_lora(model: PeftModel) -> PreTrainedModel:
    """Add the adapters to the weights and remove them; returns a model without adapters, for `save_policy`.

    In bfloat16 the sum is rounded and a small correction can be lost, so load the base model in float32 to merge.

    Raises ValueError for a model without adapters.
    """
    _require_adapters(model)
    merged = model.merge_and_unload()
    return merged.requires_grad_(True).eval()


def save_adapters(model: PeftModel, folder: str | Path) -> None:
    """Save only the adapters, a few megabytes, as safetensors with their config.

    Raises ValueError for a model without adapters, FileExistsError if the folder is not empty.
    """
    _require_adapters(model)
    folder = Path(folder).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"folder {folder} is not empty; choose another")
    # "auto" would ask the Hub whether the vocabulary was changed, and warn if the base is a model of the package.
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form, not filled in, with a path of this computer


def load_adapters(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Load saved adapters into the base model that they were trained with; they can be trained further.

    Raises FileNotFoundError if the folder has no adapters, ValueError if they do not fit the model or it already has
    adapters.
    """
    from peft import PeftModel
    from safetensors import SafetensorError

    folder = Path(folder).expanduser()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"folder {folder} has no {name}; save adapters with save_adapters")
    if has_adapters(model):
        raise ValueError("model already has adapters; merge them first with merge_lora")
    with _quiet_peft():
        try:
            return PeftModel.from_pretrained(model, folder, is_trainable=True).eval()
        except SafetensorError as error:
            raise ValueError(
                f"{folder}: adapter_model.safetensors is damaged ({error}); copy or train the adapters again"
            ) from error
        except (RuntimeError, ValueError) as error:
            first = " ".join(str(error).split("\n")[:2])  # of a list with a line for every layer
            raise ValueError(
                f"folder: the adapters in {folder} do not fit this model ({first}); load the model that they were "
                "trained with"
            ) from error


def adapter_base(folder: Path) -> str:
    """Return the name of the model that saved adapters were trained with.

    Raises ValueError: adapter_config.json is damaged or names no model.
    """
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder}: adapter_config.json is damaged ({error}); copy or train the adapters again"
        ) from error
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{folder}: adapter_config.json names no base model; write its name or folder into base_model_name_or_path"
        )
    return base


def has_adapters(model: nn.Module) -> bool:
    """Return True if a model has adapters of peft."""
    return hasattr(model, "peft_config")


def reference_policy(model: PreTrainedModel) -> PreTrainedModel:
    """Return the reference policy of a KL term: a frozen copy of the model, or the model itself if it has adapters.

    Use it inside `adapters_off(reference)`.
    """
    return model if has_adapters(model) else copy.deepcopy(model).requires_grad_(False).eval()


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the adapters of a model are disabled."""
    if not has_adapters(model):
        yield
        return
    with model.disable_adapter():
        yield


def _require_adapters(model: nn.Module) -> None:
    if not has_adapters(model):
        raise ValueError("model has no adapters; add them with add_lora")


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Hide a deprecation warning: peft uses an attribute that transformers 5.23 deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield
