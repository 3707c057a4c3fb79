"""Models in and out of folders: load a policy by name, save it whole or not at all.

A *policy* is a causal language model together with the tokenizer that it was trained with. Both scales of the
course load through the same call: `load_policy("tiny")`, the model shipped with the package, and
`load_policy("Qwen/Qwen2-0.5B-Instruct")`, any instruction-tuned model of the Hub or of a folder.

Only safetensors are read (a pickle can run code), no code of a model's repository is ever run, and weights
that do not fill the architecture exactly are refused: transformers would fill a missing layer with random
numbers and go on.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.data import data_dir
from grpo_edu.heavy_imports import collector_paused
from grpo_edu.memory import LARGE_MODEL, return_large_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_AGAIN = "save or download it again"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def tiny_dir() -> Path:
    """The folder of the shipped model."""
    return data_dir() / "models" / "tiny"


def list_models() -> list[str]:
    """Names of the shipped models, each good for `load_policy`."""
    return sorted(config.parent.name for config in tiny_dir().parent.glob("*/config.json"))


def load_policy(
    name: str | Path = "tiny", dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer.

    Args:
        name: a shipped model (`list_models()`), a folder, or a Hub id such as "Qwen/Qwen2-0.5B-Instruct".
        dtype: of the weights, "float32" (the default) or "bfloat16", or the torch.dtype.

    Returns:
        The model, in eval mode (no dropout) with gradients on, and the tokenizer.

    Raises:
        FileNotFoundError: the folder does not exist or lacks config.json, weights or tokenizer.
        ValueError: unknown name or dtype; damaged or unfitting files; pickled weights; no pad token or chat
            template.
        OSError: the Hub does not have the model, or cannot be reached.
    """
    source = _locate(name)
    if isinstance(source, Path):
        _check_folder(source)
    with collector_paused():
        import transformers.modeling_utils  # noqa: F401  most of what loading a model imports
    with _quiet_transformers():
        model = _load_model(source, _floating_dtype(dtype))
        tokenizer = _load_tokenizer(source)
    _check_tokenizer(tokenizer, model, source)
    if model.get_memory_footprint() >= LARGE_MODEL:
        return_large_blocks()
    return model.eval(), tokenizer


def load_config(name: str | Path = "tiny") -> PretrainedConfig:
    """The architecture of the policy that `load_policy` would load, without its weights; raises what that raises."""
    from transformers import AutoConfig

    source = _locate(name)
    if isinstance(source, Path):
        _check_folder(source)
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise _explained(error, source) from error


def save_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, *, overwrite: bool = False
) -> None:
    """Save model and tokenizer so that `load_policy(folder)` gives identical logits; all of it or nothing.

    The files are written to a hidden folder beside `folder` and moved into place at the end, so an
    interruption or a full disk leaves what was there before.

    Raises:
        FileExistsError: `folder` holds something and `overwrite` is False.
        ValueError: the model carries adapters that are not merged.
        OSError: the disk is full or cannot be written.
    """
    from safetensors import SafetensorError

    folder = Path(folder).expanduser().absolute()
    if hasattr(model, "peft_config"):
        raise ValueError("model: carries adapters; save model.merge_and_unload() instead")
    if folder.exists() and not (folder.is_dir() and (overwrite or not any(folder.iterdir()))):
        raise FileExistsError(f"folder: {folder} is not empty; choose another, or replace it: overwrite=True")
    unique = uuid.uuid4().hex[:8]
    staging, replaced = (folder.with_name(f".{folder.name}.{part}-{unique}") for part in ("new", "old"))
    try:
        with _quiet_transformers():
            staging.mkdir(parents=True)
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        if folder.exists():
            folder.rename(replaced)
        staging.rename(folder)
    except (OSError, SafetensorError) as error:
        size = sum(weight.nbytes for weight in model.parameters()) / 1e6
        raise OSError(
            f"folder: could not write {folder} ({error}); nothing there was changed. The model takes {size:.0f} MB: "
            "free that on the disk or choose another folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)


def _locate(name: str | Path) -> Path | str:
    """The folder that `name` means, or the Hub id that it is."""
    shipped = tiny_dir().parent / name
    if str(name) in list_models():
        return shipped
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    known = f"shipped models: {', '.join(list_models()) or 'none'}; a folder or a Hub id (owner/name) works"
    if str(name) == "tiny":
        raise FileNotFoundError(f"name: {shipped} is missing; make it with python -m grpo_edu.pretraining")
    if isinstance(name, Path) or str(name).startswith((".", "~", "/")) or "\\" in name or name.count("/") > 1:
        raise FileNotFoundError(f"name: there is no folder {name}; {known}")
    if not _HUB_ID.fullmatch(name):
        raise ValueError(f"name: {name!r} is unknown; {known}")
    return name


def _floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    chosen: Any = torch.float32 if dtype is None else dtype
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"dtype: {dtype!r} is no floating-point type; use 'float32' or 'bfloat16'")
    return chosen


def _check_folder(folder: Path) -> None:
    """Say what a model folder lacks, before transformers guesses."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder}: has no config.json, so it is no model folder; {_AGAIN}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}: its config.json is damaged ({error}); {_AGAIN}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{folder}: its config.json names no model_type; {_AGAIN}")
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise ValueError(
                f"{folder}: has its weights only as a pickle, which can run code when opened, so it is refused. "
                "If you trust it, open it with transformers' from_pretrained and save_pretrained it as safetensors"
            )
        raise FileNotFoundError(f"{folder}: has no model.safetensors; {_AGAIN}")
    if not names.intersection(_TOKENIZER_FILES):
        raise FileNotFoundError(f"{folder}: has no tokenizer; copy tokenizer.json and tokenizer_config.json there")


def _load_model(source: Path | str, dtype: torch.dtype) -> PreTrainedModel:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # so that they come back in the report, and are refused below
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ValueError(f"{source}: its safetensors are damaged ({error}); {_AGAIN}") from error
    except (ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{source}: transformers cannot build what its config.json says ({error})") from error
    except OSError as error:
        raise _explained(error, source) from error
    faults = {kind: report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    named = [f"{len(keys)} {kind} (first: {min(map(str, keys))})" for kind, keys in faults.items() if keys]
    if named:
        raise ValueError(
            f"{source}: its weights do not fit its config.json, {', '.join(named)}; such layers would be random; "
            f"{_AGAIN}"
        )
    return model


def _load_tokenizer(source: Path | str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer chooses a class by the model's type and may replace the way tokenizer.json splits text (it
    # does for Qwen2), which changes the ids without a word. A folder's tokenizer.json is read as it stands.
    verbatim = isinstance(source, Path) and (source / "tokenizer.json").is_file()
    try:
        if verbatim:
            return PreTrainedTokenizerFast.from_pretrained(source)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise _explained(error, source) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source}: its tokenizer files are damaged ({error}); {_AGAIN}") from error


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, source: Path | str) -> None:
    """Refuse a tokenizer that would fail later, and less clearly."""
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{source}: the tokenizer has no pad token. Set tokenizer.pad_token to a token that never ends an "
            "answer (the EOS, masked as padding, would never be learned), save it to a folder and load that"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source}: the tokenizer has no EOS token; set tokenizer.eos_token and save it")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{source}: the tokenizer has no chat template, so this is a base model. Use its instruction-tuned "
            "sibling, or set tokenizer.chat_template, save it to a folder and load that"
        )
    if len(tokenizer) > rows:
        raise ValueError(f"{source}: the tokenizer has {len(tokenizer)} tokens, the model {rows}: not a pair")


def _explained(error: OSError, source: Path | str) -> OSError:
    """The same failure with what to do about it."""
    if isinstance(source, Path):
        return OSError(f"{source}: could not be read ({error}); {_AGAIN}")
    if _is_gated(error):
        return PermissionError(
            f"name: {source} is gated. Accept its terms on https://huggingface.co/{source}, then sign in once with "
            "`hf auth login`; or choose a model without a gate, such as Qwen/Qwen2-0.5B-Instruct"
        )
    return OSError(
        f"name: there is no folder {source}, and the Hub did not give it. Check the name and the network; without "
        f"one, download it elsewhere (hf download {source} --local-dir FOLDER) and load that folder. The Hub's "
        f"own words: {error}"
    )


def _is_gated(error: BaseException | None) -> bool:
    """Whether the Hub refused because the model's terms were not accepted."""
    from huggingface_hub.errors import GatedRepoError

    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars or reports of transformers while weights are read or written; a download shows its own."""
    from transformers.utils import logging

    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(verbosity)
