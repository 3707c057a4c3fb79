"""Read the files of a model, with errors that say what they lack; choose a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grpo_edu.config import DEVICES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def cache_dir() -> Path:
    """Return the folder of the models that were converted from GGUF files, in the cache of Hugging Face (`HF_HOME`)."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "grpo_edu"


def floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    chosen: Any = torch.float32 if dtype is None else dtype
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or another floating-point type, got {dtype!r}")
    return chosen


def _again(source: Path | str) -> str:
    """Return what to do about a damaged folder."""
    converted = isinstance(source, Path) and source.parent == cache_dir()
    return "delete it, and it is converted again" if converted else "save or download it again"


def check_folder(folder: Path) -> None:
    """Raise an error that names what a model folder lacks; transformers' own messages often do not."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a model folder; {_again(folder)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}: config.json is damaged ({error}); {_again(folder)}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{folder}: config.json has no model_type; {_again(folder)}")
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            raise ValueError(
                f"{folder} has its weights only as a pickle, which can run code when it is opened, so it is refused. "
                "If you trust it, load it with transformers' from_pretrained and save it again as safetensors."
            )
        raise FileNotFoundError(f"{folder} has no model.safetensors; {_again(folder)}")
    if not names.intersection(_TOKENIZER_FILES):
        raise FileNotFoundError(f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json there")


def load_model(source: Path | str, dtype: torch.dtype, obstacle: str) -> PreTrainedModel:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are then listed in the report, and refused below
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise ValueError(f"{source}: the safetensors files are damaged ({error}); {_again(source)}") from error
    except (ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise ValueError(f"{source}: transformers cannot build the model of config.json ({error})") from error
    except OSError as error:
        raise with_load_advice(error, source, obstacle) from error
    check_report(report, source)
    for key, weight in model.named_parameters():
        if not all(torch.isfinite(end) for end in weight.detach().aminmax()):
            raise ValueError(f"{source}: the weights are damaged: {key} contains NaN or infinity; {_again(source)}")
    return model


def check_report(report: Mapping[str, Any], source: Path | str) -> None:
    """Raise ValueError if transformers' report of a loaded model names weights that are missing or do not fit."""
    faults = {kind: report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    named = [f"{len(keys)} {kind} (first: {min(map(str, keys))})" for kind, keys in faults.items() if keys]
    if named:
        raise ValueError(
            f"{source}: the weights do not match config.json: {', '.join(named)}. Such layers would be random; "
            f"{_again(source)}"
        )


def load_tokenizer(source: Path | str, obstacle: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer chooses a class by the model's type, which may replace the rules of tokenizer.json for splitting
    # text (for Qwen2 it does) and silently change the ids. The tokenizer.json of a folder is therefore used unchanged.
    verbatim = isinstance(source, Path) and (source / "tokenizer.json").is_file()
    try:
        if verbatim:
            return PreTrainedTokenizerFast.from_pretrained(source)
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except OSError as error:
        raise with_load_advice(error, source, obstacle) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source}: the tokenizer files are damaged ({error}); {_again(source)}") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, source: Path | str) -> None:
    """Raise ValueError for a tokenizer that would cause an error later, with a less clear message."""
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{source}: the tokenizer has no pad token. Set tokenizer.pad_token to a token that never ends an answer "
            "(the EOS token would be masked as padding and never learned), save both to a folder and load that."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source}: the tokenizer has no EOS token; set tokenizer.eos_token and save it")


def check_chat_template(tokenizer: PreTrainedTokenizerBase, source: Path | str) -> None:
    """Raise ValueError for a tokenizer that cannot put questions into the form that its model expects."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{source}: the tokenizer has no chat template, so this is a base model. Use an instruction-tuned version, "
            "train it with a `prompt_template`, or set tokenizer.chat_template, save both to a folder and load that."
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, source: Path | str) -> None:
    """Raise ValueError for a tokenizer with more tokens than the model has embeddings."""
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens, but the model {rows}; use the model's own tokenizer"
        )


def with_load_advice(error: OSError, source: Path | str, obstacle: str) -> OSError:
    """Return the same error with advice on what to do; obstacle: why the Hub was not asked."""
    if isinstance(source, Path):
        return OSError(f"{source} could not be read ({error}); {_again(source)}")
    if _is_gated(error):
        return PermissionError(
            f"name: {source} is gated. Accept its terms on https://huggingface.co/{source}, then sign in once with "
            "`hf auth login`; or choose a model that is not gated, such as Qwen/Qwen2-0.5B-Instruct."
        )
    return OSError(
        f"name: folder {source} does not exist, and the Hub could not provide this model ({obstacle or error}). Check "
        f"the name and the network. Without a network, download the model on another computer (hf download {source} "
        "--local-dir FOLDER) and load that folder."
    )


def _is_gated(error: BaseException | None) -> bool:
    """Return True if the Hub refused access because the terms of the model were not accepted."""
    from huggingface_hub.errors import GatedRepoError

    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars and reports while weights are read or written; downloads show their own."""
    from transformers.utils import logging

    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(verbosity)


_WORTH_A_GPU = 50_000_000  # parameters; a step of a smaller model is mostly waiting, which a GPU does not shorten


def choose_device(device: str = "auto", num_parameters: int = _WORTH_A_GPU) -> torch.device:
    """Return the device for a model of this many parameters; "auto" is a GPU if there is one and it is worth it.

    Raises ValueError for an unknown device, or one that this computer does not have.

    >>> choose_device("cpu")
    device(type='cpu')
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        found = [name for name in ("cuda", "mps") if available[name] and num_parameters >= _WORTH_A_GPU]
        return torch.device(found[0] if found else "cpu")
    if device not in available:
        raise ValueError(f"`device`: {device!r} is unknown; choose from {', '.join(DEVICES)}.")
    if not available[device]:
        here = ", ".join(name for name, there in available.items() if there)
        raise ValueError(
            f"`device`: {device} is not available to PyTorch on this computer, which has {here}; use auto."
        )
    return torch.device(device)
