"""Loading and saving policies: exact round trips, and a clear word for everything that can be wrong with a folder."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from random_policy import byte_tokenizer, random_model
from safetensors.torch import load_file, save_file
from small_policy import same_weights
from torch.testing import assert_close
from transformers import AutoTokenizer, Qwen2Tokenizer
from transformers.utils import logging

from grpo_edu import models
from grpo_edu.fast.lora import adapter_base, add_lora, save_adapters
from grpo_edu.models import list_models, load_config, load_policy, save_policy, tiny_dir
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.problems.hub import why_hub_unreachable

TEXT = "<|im_start|>user\nZoe\u0308 has 14 pears,  and\n34 more.<|im_end|>\n"  # an ë that NFC would compose


@pytest.fixture(scope="module")
def policy():
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, num_hidden_layers=2, tie_word_embeddings=True), tokenizer


@pytest.fixture(scope="module")
def saved(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "policy"
    save_policy(*policy, folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a good folder, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "policy"))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(model, tokenizer):
    with torch.no_grad():
        return model(torch.tensor([tokenizer(TEXT).input_ids])).logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_policy_reloads_to_identical_weights(tmp_path, tied):
    tokenizer = byte_tokenizer()
    model = random_model(tokenizer, num_hidden_layers=2, tie_word_embeddings=tied)
    save_policy(model, tokenizer, tmp_path / "a" / "policy")
    again, its_tokenizer = load_policy(tmp_path / "a" / "policy")
    assert its_tokenizer(TEXT).input_ids == tokenizer(TEXT).input_ids
    assert same_weights(again.state_dict(), model.state_dict())
    assert_close(logits(again, its_tokenizer), logits(model, tokenizer))
    assert not again.training
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in again.parameters())
    assert again.generation_config.eos_token_id == model.generation_config.eos_token_id
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["policy"]  # nothing half-written stays


def test_tokenizer_json_is_read_as_it_stands(saved, policy):
    """AutoTokenizer puts Qwen2's own normalizer and way of splitting text in place of the saved ones."""
    ids = policy[1](TEXT).input_ids
    assert load_policy(saved)[1](TEXT).input_ids == ids
    assert AutoTokenizer.from_pretrained(saved)(TEXT).input_ids != ids


def test_a_real_qwen2_tokenizer_reads_the_same_either_way(policy, tmp_path):
    vocab = {token: index for token, index in policy[1].get_vocab().items() if index < 256}
    vocab |= {"ar": 256, "Ġ1": 257}  # the second merge never applies: Qwen2 splits a space from a digit
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "extra_special_tokens": ["<|im_start|>"]}
    qwen2 = Qwen2Tokenizer(vocab=vocab, merges=[("a", "r"), ("Ġ", "1")], **special)
    qwen2.chat_template = policy[1].chat_template
    save_policy(random_model(qwen2, num_hidden_layers=1), qwen2, tmp_path / "qwen2")
    _, loaded = load_policy(tmp_path / "qwen2")
    ids = qwen2(TEXT).input_ids
    assert 256 in ids and 257 not in ids
    assert loaded(TEXT).input_ids == ids == AutoTokenizer.from_pretrained(tmp_path / "qwen2")(TEXT).input_ids
    assert (loaded.pad_token, loaded.eos_token) == ("<|endoftext|>", "<|im_end|>")


def test_dtype_is_chosen(saved):
    for dtype in ("bfloat16", torch.bfloat16, "torch.bfloat16"):
        assert load_policy(saved, dtype)[0].dtype == torch.bfloat16
    for dtype in ("int8", "float7", torch.int64, 32):
        with pytest.raises(ValueError, match="dtype .*'float32', 'bfloat16'"):
            load_policy(saved, dtype)


def test_nothing_is_printed(saved, policy, tmp_path, capfd):
    verbosity = logging.get_verbosity()
    save_policy(*load_policy(str(saved)), tmp_path / "copy")
    assert capfd.readouterr() == ("", "")
    assert logging.get_verbosity() == verbosity
    assert logging.set_tqdm_hook(None) is None


def test_the_shipped_model_loads():
    if not (tiny_dir() / "config.json").is_file():
        pytest.skip("the tiny model is not built yet: python -m recipes.pretraining")
    assert "tiny" in list_models()
    model, tokenizer = load_policy()
    assert model.config.model_type == "qwen2"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_shipped_models_are_named(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "data_dir", lambda: tmp_path)
    assert list_models() == []
    with pytest.raises(FileNotFoundError, match=r"tiny is missing.*python -m recipes\.pretraining"):
        load_policy()
    shutil.copytree(saved, tmp_path / "models" / "tiny")
    assert list_models() == ["tiny"]
    assert_close(logits(*load_policy()), logits(*load_policy("tiny")))
    adapted = add_lora(load_policy("tiny")[0], rank=2)
    for weight in adapted.parameters():
        weight.data += 0.01 * weight.requires_grad
    save_adapters(adapted, tmp_path / "models" / "taught")
    assert adapter_base(tmp_path / "models" / "taught") == "tiny"  # not a folder of this computer
    assert list_models() == ["taught", "tiny"]
    taught, tokenizer = load_policy("taught")
    assert_close(logits(taught, tokenizer), logits(adapted, tokenizer))
    assert load_config("taught").hidden_size == load_config("tiny").hidden_size
    with pytest.raises(ValueError, match=r"'huge' is unknown.*taught, tiny.*Hub id"):
        load_policy("huge")
    with pytest.raises(ValueError, match="name .*got None"):
        load_policy(None)


def test_a_missing_folder_is_named(tmp_path):
    for name in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "~/no/where", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="folder .*does not exist.*Hub id"):
            load_policy(name)


def test_a_path_that_looks_like_a_hub_id_is_a_missing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    monkeypatch.setattr(models, "offline_if_hub_unreachable", lambda: pytest.fail("the Hub was asked"))
    with pytest.raises(FileNotFoundError, match="folder runs/typo does not exist"):
        load_policy("runs/typo")


@pytest.fixture
def silent_hub(monkeypatch):
    """A Hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield constants.ENDPOINT


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_within_seconds(silent_hub):
    for load, remedy in (
        (lambda: load_policy("owner/absent"), "hf download owner/absent"),
        (lambda: models.load_config("owner/absent"), "hf download owner/absent"),
        (lambda: load_gsm8k("test"), "test.jsonl from github.com"),
    ):
        started = time.monotonic()
        with pytest.raises(OSError, match=f"{silent_hub} did not answer.*{remedy}"):
            load()
        # 4 s of waiting, and what the libraries take to say that a file is not in the cache, on a busy computer
        assert time.monotonic() - started < 4 + 26


def test_the_hub_is_not_asked_where_that_is_switched_off_and_an_answer_is_an_answer(silent_hub, monkeypatch):
    class Answers:
        def head(self, url, timeout):
            assert url == silent_hub

    monkeypatch.setattr("huggingface_hub.get_session", lambda: Answers())
    assert why_hub_unreachable() == ""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: pytest.fail("the Hub was asked"))
    assert why_hub_unreachable() == "HF_HUB_OFFLINE is set"


def test_an_unreachable_hub_model_says_how_to_get_it():
    with pytest.raises(OSError, match="hf download Qwen/Qwen2-0.5B-Instruct --local-dir") as caught:
        load_policy("Qwen/Qwen2-0.5B-Instruct")
    assert "load that folder" in str(caught.value)


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def truncate(folder, length):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])


def to_pickle(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def spoil_a_weight(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (without("config.json"), FileNotFoundError, "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{oops"), ValueError, "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), ValueError, "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "no model_type"),
        (lambda folder: edit_config(folder, model_type="nonsense"), ValueError, "cannot build .*nonsense"),
        (lambda folder: edit_config(folder, num_hidden_layers=7), ValueError, "cannot build"),
        (without("tokenizer.json"), FileNotFoundError, "has no tokenizer; copy tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"ver'), ValueError, "tokenizer files are damaged"),
        (without("model.safetensors"), FileNotFoundError, "has no model.safetensors"),
        (to_pickle, ValueError, "only as a pickle"),
        (lambda folder: truncate(folder, 0), ValueError, "safetensors.*damaged"),
        (lambda folder: truncate(folder, 5000), ValueError, "safetensors.*damaged"),
        (lambda folder: truncate(folder, -1), ValueError, "safetensors.*damaged"),
        (lambda folder: edit_config(folder, hidden_size=64), ValueError, "mismatched .*would be random"),
        (
            lambda folder: edit_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3),
            ValueError,
            r"12 missing \(first: model.layers.2",
        ),
        (
            lambda folder: edit_config(folder, num_hidden_layers=1, layer_types=["full_attention"]),
            ValueError,
            r"12 unexpected \(first: model.layers.1",
        ),
        (
            lambda folder: edit_config(folder, tie_word_embeddings=False),
            ValueError,
            r"1 missing \(first: lm_head.weight\).*would be random",
        ),
        (spoil_a_weight, ValueError, r"damaged: model.layers.1.mlp.up_proj.weight contains NaN.*again"),
    ],
)
def test_a_damaged_folder_is_refused(folder, damage, error, message, capfd):
    damage(folder)
    with pytest.raises(error, match=message) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "field, message",
    [
        ("pad_token", "no pad token. Set tokenizer.pad_token"),
        ("eos_token", "no EOS token"),
        ("chat_template", "no chat template, so this is a base model"),
    ],
)
def test_a_tokenizer_that_would_fail_later_is_refused(policy, tmp_path, field, message):
    tokenizer = byte_tokenizer()
    setattr(tokenizer, field, None)
    save_policy(policy[0], tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match=message):
        load_policy(tmp_path / "policy")


def test_a_foreign_tokenizer_is_refused(policy, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more"])
    save_policy(policy[0], tokenizer, tmp_path / "policy")
    with pytest.raises(ValueError, match="260 tokens.*259"):
        load_policy(tmp_path / "policy")


def test_an_existing_folder_is_kept_unless_told(policy, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    save_policy(*policy, tmp_path / "empty")
    other = random_model(policy[1], seed=1, num_hidden_layers=2)
    with pytest.raises(FileExistsError, match="not empty.*`overwrite`"):
        save_policy(other, policy[1], tmp_path / "empty")
    assert_close(logits(*load_policy(tmp_path / "empty")), logits(*policy))
    save_policy(other, policy[1], tmp_path / "empty", overwrite=True)
    assert_close(logits(*load_policy(tmp_path / "empty")), logits(other, policy[1]))
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    (tmp_path / "empty" / "thesis").mkdir()  # a folder that holds more than a model is never replaced
    with pytest.raises(FileExistsError, match="other things than a model"):
        save_policy(other, policy[1], tmp_path / "empty", overwrite=True)
    shutil.copytree(tmp_path / "empty", tmp_path / "noted", ignore=shutil.ignore_patterns("thesis"))
    (tmp_path / "noted" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="other things than a model"):
        save_policy(other, policy[1], tmp_path / "noted", overwrite=True)
    assert (tmp_path / "noted" / "notes.txt").read_text() == "mine"
    with pytest.raises(FileExistsError, match="other things than a model"):
        save_policy(other, policy[1], tmp_path, overwrite=True)
    assert (tmp_path / "empty" / "thesis").is_dir()
    (tmp_path / "file").write_text("a file, no folder")
    with pytest.raises(FileExistsError):
        save_policy(other, policy[1], tmp_path / "file", overwrite=True)


def test_an_interrupted_save_leaves_what_was_there(policy, tmp_path, monkeypatch):
    save_policy(*policy, tmp_path / "policy")
    before = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_policy(policy[0], tokenizer, tmp_path / "policy", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.skipif(os.name == "nt", reason="limits on file size are a Unix notion")
def test_a_disk_that_takes_no_more_leaves_nothing_behind(policy, tmp_path):
    """Files may have 20 kB for a moment; the weights need more, so the write itself fails."""
    import resource

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, usual[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_policy(*policy, tmp_path / "policy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    said = str(caught.value)
    assert said.startswith(f"folder {tmp_path / 'policy'}")
    assert "unchanged" in said and "needs 0 MB" in said and "another folder" in said
    assert list(tmp_path.iterdir()) == []


def test_unmerged_adapters_are_refused(policy, tmp_path):
    model = random_model(policy[1], num_hidden_layers=1)
    model.peft_config = {}
    with pytest.raises(ValueError, match="merge_and_unload"):
        save_policy(model, policy[1], tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
