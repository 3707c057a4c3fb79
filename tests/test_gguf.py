"""Any GGUF file as a model: its weights, tokens and end of turn, the cache, and what is refused with a sentence."""

import json
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH
from random_policy import CHAT_TEMPLATE, random_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_edu import evaluate, gguf_files, load_policy
from grpo_edu.cli.main import main
from grpo_edu.fast.lora import add_lora, save_adapters
from grpo_edu.models import load_config, save_policy
from grpo_edu.problems.files import load_problems

TEXT = "Solve the problem. There are 12 or 345 eggs in 2024; she's sold 1,200.\n\n  #### 48 Über"
KINDS = {
    "qwen2": (MODEL_ARCH.QWEN2, Qwen2ForCausalLM, Qwen2Config, "qwen2"),
    "llama": (MODEL_ARCH.LLAMA, LlamaForCausalLM, LlamaConfig, "llama-bpe"),
}


def trained_tokenizer(rule):
    """A byte-level tokenizer with merges of its own, which splits text by a rule that GGUF files name."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC() if rule == "qwen2" else None
    split = pre_tokenizers.Split(Regex(gguf_files._SPLITS[rule]), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    backend.train_from_iterator([TEXT] * 3, trainer)
    names = {"pad_token": special[0], "eos_token": special[2], "extra_special_tokens": special[1:2]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **names)


def policy_of(kind, **options):
    _, model, config, rule = KINDS[kind]
    tokenizer = trained_tokenizer(rule)
    return random_model(tokenizer, model, config, max_position_embeddings=1024, **options), tokenizer


def permuted(weight, heads):
    """The rows of q or k of a Llama in the order of llama.cpp's rotation."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(file, kind="qwen2", model=None, tokenizer=None, stored=None, **changes):
    """Write a policy as a GGUF file. stored: tensor → its number format; changes: other values of its metadata."""
    if model is None:
        model, tokenizer = policy_of(kind)
    architecture = changes.pop("architecture", kind)
    config, merges = model.config, json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    fields = {
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": KINDS[kind][3],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in tokenizer.all_special_tokens else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    writer = GGUFWriter(file, architecture)
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in {**fields, **changes}.items():
        if value is not None:
            add[type(value)](name, value)
    names = get_tensor_name_map(KINDS[kind][0], config.num_hidden_layers)
    tensors = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): weight.float().numpy()
        for name, weight in model.state_dict().items()
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    for name, format_ in (stored or {}).items():
        tensors.setdefault(name, model.get_input_embeddings().weight.detach().numpy())
        tensors[name] = quants.quantize(tensors[name], format_)
    for name, weight in tensors.items():
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
        if kind == "llama" and heads:
            weight = permuted(weight, heads)
        writer.add_tensor(name, weight, raw_dtype=(stored or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "grpo_edu"


@pytest.fixture
def conversions(monkeypatch):
    """The files that were converted, in their order."""
    read, done = gguf_files._read, []

    def count(file, reader):
        done.append(file)
        time.sleep(0.2)
        return read(file, reader)

    monkeypatch.setattr(gguf_files, "_read", count)
    return done


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_tokens_are_those_of_the_model(tmp_path, kind, tied):
    model, tokenizer = policy_of(kind, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "model.gguf", kind, model, tokenizer)
    loaded, its_tokenizer = load_policy(file)
    assert loaded.config.tie_word_embeddings == tied and load_config(file).model_type == kind
    weights = loaded.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    ids = tokenizer(TEXT + "<|im_end|>").input_ids
    assert its_tokenizer(TEXT + "<|im_end|>").input_ids == ids and its_tokenizer.decode(ids) == TEXT + "<|im_end|>"
    torch.testing.assert_close(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert its_tokenizer.eos_token == "<|im_end|>" and its_tokenizer.pad_token == "<|endoftext|>"
    assert loaded.generation_config.eos_token_id == its_tokenizer.eos_token_id


def test_of_a_tied_matrix_that_is_stored_twice_the_more_precise_one_is_taken(tmp_path):
    model, tokenizer = policy_of("qwen2", tie_word_embeddings=True)
    formats = {"token_embd.weight": GGMLQuantizationType.Q4_0, "output.weight": GGMLQuantizationType.Q8_0}
    loaded, _ = load_policy(write_gguf(tmp_path / "model.gguf", "qwen2", model, tokenizer, formats))
    table = model.get_input_embeddings().weight
    assert loaded.num_parameters() == model.num_parameters()
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert (loaded.get_output_embeddings().weight - table).norm() < 0.01 * table.norm()


def test_a_sentencepiece_vocabulary_is_checked_by_its_scores(tmp_path):
    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(set("▁" + TEXT.replace(" ", "▁").replace("\n", "")))
    pieces = ["▁t", "he", "▁the", "▁problem", "pr", "ob", "prob", "le", "lem", "problem", "▁p", "ggs", "gg", "▁e"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [-100.0] * len(letters)
    model = random_model(trained_tokenizer("llama-bpe"), LlamaForCausalLM, LlamaConfig, vocab_size=len(tokens))
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.chat_template": template,
    }
    file = write_gguf(tmp_path / "model.gguf", "llama", model, trained_tokenizer("llama-bpe"), **changes)
    _, tokenizer = load_policy(file)
    assert tokenizer.tokenize("the problem eggs~") == ["▁the", "▁problem", "▁e", "ggs", "<0x7E>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<s>")


def test_the_end_of_a_turn_is_what_the_chat_template_writes(tmp_path):
    """Some files name the token that ends a text, and pad with the token that ends a turn."""
    changes = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.padding_token_id": 2}
    model, tokenizer = load_policy(write_gguf(tmp_path / "model.gguf", **changes))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (model.generation_config.eos_token_id, model.config.pad_token_id) == (2, 0)


def test_a_base_model_needs_a_template(tmp_path):
    file = write_gguf(tmp_path / "base.gguf", **{"tokenizer.chat_template": None})
    with pytest.raises(ValueError, match=r"base.gguf: .* no chat template, so this is a base model.*`prompt_template`"):
        load_policy(file)
    assert load_policy(file, chat_template="{{ messages[0].content }}")[1].chat_template


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "rwkv9"}, "architecture 'rwkv9', which transformers cannot read"),
        ({"tokenizer.ggml.pre": "unheard-of"}, "names the rule 'unheard-of' for splitting text.*known are qwen2"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "joins digits, which the merges of the file never do"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of the kind 'bert'"),
        ({"qwen2.rope.scaling.type": "yarn"}, r"scales its positions \(yarn\)"),
        ({"qwen2.block_count": 2}, "holds .* weights, but transformers reads"),
        ({"qwen2.block_count": 4}, "do not match config.json: .* missing"),
    ],
)
def test_what_is_not_certain_is_refused_and_leaves_nothing(tmp_path, cache, changes, message):
    file = write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        load_policy(file)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path, kept):
    file = write_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.gguf is damaged, incomplete or no GGUF file.*download it again"):
        load_policy(file)


LAST_STRING = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(
    ("counts", "rest"),
    [
        ((0, 1), LAST_STRING + struct.pack("<IIQ", 9, 4, 2**60)),  # an array: in gguf, an endless list of nothing
        ((0, 2**62), b""),
        ((2**62, 0), b""),
        ((0, 1), LAST_STRING + struct.pack("<IQ", 8, 2**63)),
        ((0, 1), LAST_STRING + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000),
    ],
)
def test_a_header_that_announces_more_than_there_is_is_refused_at_once(tmp_path, counts, rest):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + rest)
    with pytest.raises(ValueError, match="model.gguf is damaged, incomplete or no GGUF file"):
        load_policy(file)


def test_a_file_that_does_not_exist_is_said_at_once(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match="file .*none.gguf does not exist"):
        load_policy(tmp_path / "none.gguf")
    assert main(["evaluate", "--model", str(tmp_path / "none.gguf")]) == 2
    assert "none.gguf does not exist" in capsys.readouterr().err


def test_a_file_is_converted_once_and_another_under_its_name_anew(tmp_path, conversions, cache):
    file = write_gguf(tmp_path / "model.gguf")
    with ThreadPoolExecutor(2) as pool:  # a lock of one thread holds for the other, as for another process
        folders = list(pool.map(lambda _: gguf_files.convert_gguf(file, save_policy), range(2)))
    assert len(conversions) == 1 and folders[0] == folders[1]
    before = load_policy(file)[0].state_dict()
    model, tokenizer = policy_of("qwen2", seed=1)
    write_gguf(file, "qwen2", model, tokenizer)
    after = load_policy(file)[0].state_dict()
    assert len(conversions) == 2 and len([path for path in cache.iterdir() if path.is_dir()]) == 2
    assert not torch.equal(before["model.norm.weight"], after["lm_head.weight"]) and not all(
        torch.equal(before[name], after[name]) for name in before
    )


def test_what_a_killed_conversion_left_is_removed_and_never_loaded(tmp_path, conversions, cache):
    file = write_gguf(tmp_path / "model.gguf")
    folder = gguf_files._folder("model", gguf_files._hash_file(file))
    half = folder.with_name(f".{folder.name}.new-12345678")
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    load_policy(file)
    assert not half.exists() and len(conversions) == 1


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch, small_disk):
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(small_disk))
    file = write_gguf(tmp_path / "model.gguf")
    with pytest.raises(OSError, match=rf"'model.gguf' could not be converted into {small_disk}.*of 20 MB.*HF_HOME"):
        load_policy(file)
    monkeypatch.setattr(gguf_files, "_SPARE_BYTES", 0)  # the disk fills during the conversion
    (small_disk / "filler").write_bytes(bytes(4 * 2**20 - 150_000))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(1, 1, 10**9))
    with pytest.raises(OSError, match="'model.gguf' could not be converted.*HF_HOME"):
        load_policy(file)
    assert [path.suffix for path in (small_disk / "grpo_edu").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="'model.gguf' could not be converted.*HF_HOME"):
        load_policy(write_gguf(tmp_path / "model.gguf"))


def test_a_damaged_cache_says_what_to_delete(tmp_path, cache):
    file = write_gguf(tmp_path / "model.gguf")
    load_policy(file)
    (weights,) = cache.glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{weights.parent}: .*damaged.*delete it, and it is converted again"):
        load_policy(file)


def test_a_missing_package_says_how_to_get_it_and_a_converted_file_does_not_need_it(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setattr(gguf_files, "_can_read", lambda: False)
    with pytest.raises(FileNotFoundError, match="needs the package gguf; run `pip install gguf`"):
        load_policy(file)
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    load_policy(file)
    monkeypatch.setattr(gguf_files, "_can_read", lambda: False)
    load_policy(file)


def test_adapters_name_the_file_as_their_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = load_policy(write_gguf(tmp_path / "model.gguf").name)
    save_adapters(add_lora(model, rank=2), tmp_path / "adapters")
    stored = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(tmp_path / "model.gguf")
    assert load_policy(tmp_path / "adapters")[0].config.model_type == "qwen2"


@pytest.mark.slow
def test_from_the_file_to_a_folder_of_plain_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_gguf(Path("model.gguf"))
    lengths = ["--max-completion-length", "6", "--n", "4"]
    assert main(["evaluate", "--model", "model.gguf", "--data", "basic", *lengths]) == 0
    sizes = ["--steps", "3", "--prompts-per-step", "2", "--num-generations", "2", "--lora-rank", "2", *lengths]
    assert main(["train", "--model", "model.gguf", "--data", "basic", *sizes, "--rewards", "length"]) == 0
    (run,) = Path("runs").iterdir()
    assert run.name == "model-basic-seed0"
    assert json.loads((run / "config.json").read_text())["source"] == str(tmp_path / "model.gguf")
    assert main(["export", str(run), "exported"]) == 0
    assert "base_model:" not in Path("exported/README.md").read_text()
    plain, tokenizer = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
    problems = load_problems("basic", "heldout", n=4)
    settings = {"temperature": 0, "max_completion_length": 6}
    assert (
        evaluate(plain, tokenizer, problems, **settings).completions
        == evaluate(*load_policy(run / "model"), problems, **settings).completions
    )
