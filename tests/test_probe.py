"""The probe of number formats: it times this machine, and the choice follows from what it found."""

import re

import pytest
from random_policy import byte_tokenizer, random_model
from small_policy import save_small_policy
from transformers import GPT2Config, Qwen2Config

from grpo_edu.machine import probe
from grpo_edu.machine.probe import DtypeProbe, choose_dtype, probe_dtypes
from grpo_edu.models import load_config, load_policy

FASTER = DtypeProbe({"float32": 3.0, "bfloat16": 1.0}, {"float32": 4.0, "bfloat16": 2.0})
SLOWER = DtypeProbe({"float32": 1.0, "bfloat16": 0.95}, {"float32": 1.0, "bfloat16": 2.0})


@pytest.mark.parametrize(
    "config",
    [
        random_model(byte_tokenizer()).config,
        GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2),
        Qwen2Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        ),
    ],
    ids=["qwen2", "gpt2", "sliding"],
)
def test_a_probe_times_every_part(config):
    layers = config.num_hidden_layers
    found = probe_dtypes(config, repeats=1)
    for seconds in (found.decode, found.forward):
        assert seconds.keys() == {"float32", "bfloat16"} and all(0 < value < 60 for value in seconds.values())
    assert config.num_hidden_layers == layers  # the config is left alone


def test_twice_as_many_layers_take_twice_the_time_of_layers(monkeypatch):
    """With a clock that counts a second a call, 4 layers are 2 timed ones twice; the head counts once."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(ticks))
    config = random_model(byte_tokenizer(), num_hidden_layers=4).config
    found = probe_dtypes(config, repeats=1)
    assert found.decode == {"float32": 2 + 1, "bfloat16": 2 + 1}
    assert found.forward == {"float32": 2 + 32, "bfloat16": 2 + 32}  # 256 tokens are 32 heads of 8 rows


def test_no_probe_without_repeats():
    with pytest.raises(ValueError, match="repeats: must be at least 1"):
        probe_dtypes(GPT2Config(n_layer=1), repeats=0)


def test_a_tenth_is_not_worth_the_rounding():
    assert FASTER.faster == "bfloat16" and SLOWER.faster == "float32"
    assert str(FASTER) == "bfloat16 is 3 times as fast as float32 here in a rollout, 2 times in a forward"


@pytest.mark.parametrize(
    ("asked", "found", "trains_weights", "dtype", "words"),
    [
        ("float32", None, True, "float32", ""),
        ("auto", FASTER, False, "bfloat16", "3 times as fast.*; using bfloat16"),
        ("auto", SLOWER, False, "float32", "1.1 times as fast.*; using float32"),
        ("auto", FASTER, True, "float32", "3 times as fast.*using float32"),
        ("auto", SLOWER, True, "float32", "using float32"),
        ("bfloat16", SLOWER, False, "bfloat16", "0.5 times in a forward$"),
        ("bfloat16", FASTER, True, "bfloat16", "small updates of its weights will be lost"),
    ],
)
def test_the_choice_follows_the_probe_and_says_why(monkeypatch, asked, found, trains_weights, dtype, words):
    monkeypatch.setattr(probe, "probe_dtypes", lambda config: found)
    chosen, why = choose_dtype(asked, "tiny", trains_weights=trains_weights)
    assert chosen == dtype and re.search(words, why)


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="dtype: 'int8' is unknown; choose one of float32, bfloat16, auto"):
        choose_dtype("int8", "tiny", trains_weights=False)


def test_load_config_is_the_architecture_that_load_policy_loads(tmp_path):
    folder = save_small_policy(tmp_path / "policy")
    assert load_config(folder).to_dict() == load_policy(folder)[0].config.to_dict()
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        load_config("nothing")
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_config(folder)
