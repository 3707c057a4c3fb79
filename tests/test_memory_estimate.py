"""The estimate against what autograd really keeps, against arithmetic by hand, and against measured peaks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.chunked_logps import LOGITS_PER_CHUNK
from grpo_edu.fast.lora import add_lora
from grpo_edu.fast.memory_estimate import (
    MemoryEstimate,
    ModelShape,
    activation_bytes,
    empty_model,
    estimate_memory,
    layer_bytes,
    logits_bytes,
)
from grpo_edu.models import load_policy

REPOSITORY = Path(__file__).resolve().parents[1]
SIZES = dict(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
)
QWEN2_05B = Qwen2Config(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def bytes_kept_by_layers(model, tokens):
    """What autograd keeps of a forward pass with a mask of four dimensions, without the ends of the model."""
    kept = {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def forward(layers):
        kept.clear()
        decoder = model.get_decoder()
        held, decoder.layers = decoder.layers, decoder.layers[:layers]
        mask = torch.zeros(1, 1, tokens, tokens, dtype=model.dtype)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = decoder(input_ids=torch.ones(1, tokens, dtype=torch.long), attention_mask=mask, use_cache=False)
        decoder.layers = held
        return sum(kept.values()), states

    return forward(3)[0] - forward(2)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapters", [None, "all-linear", ["q_proj", "v_proj"]])
@pytest.mark.parametrize(("kind", "config"), [(Qwen2ForCausalLM, Qwen2Config), (LlamaForCausalLM, LlamaConfig)])
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(kind, config, adapters, dtype):
    model = kind(config(**SIZES)).to(dtype).eval()
    if adapters:
        model = add_lora(model, rank=1, target_modules=adapters)
    tokens = 50
    assert layer_bytes(ModelShape.of(model)) * tokens == pytest.approx(bytes_kept_by_layers(model, tokens), rel=0.05)


def test_every_part_by_hand():
    """A model of 2 layers, H 8, MLP 12, 2 heads of 4, 1 key head, V 10, tied; 3 prompts of 5 tokens, G 2, C 4."""
    config = Qwen2Config(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=10,
        tie_word_embeddings=True,
    )
    settings = GRPOConfig(prompts_per_step=3, num_generations=2, max_completion_length=4, beta=0.1)
    estimate = estimate_memory(empty_model(config), settings, prompt_length=5)
    # q 8·8+8, k and v 8·4+4 each, o 8·8, gate, up and down 8·12 each, two norms of 8; embedding 10·8, a last norm
    weights = 4 * (2 * (72 + 36 + 36 + 64 + 3 * 96 + 16) + 80 + 8)
    assert estimate.weights == estimate.reference == estimate.gradients == weights
    assert estimate.optimizer == 2 * weights
    assert estimate.scratch == 2 * 4 * 96  # two temporary copies of the largest matrix
    assert estimate.cache == 6 * (9 * 2 * 2 * 4 * 4 + 5 * 10 * 4)  # keys and values of 9 tokens, and five times logits
    assert estimate.logits == 24 * 8 * 8 + 24 * 4 * 10 * 4 + 10 * 8 * 4  # with the gradient of the output layer
    # rows of 5 + 2·3 tokens; a layer keeps 4·(4·12 + 4·8 + 4·8) + 8·8 bytes a token, the last norm 3·8·4
    tokens = 3 * 11
    assert estimate.activations == 3 * 11 * 11 * 4 + tokens * (96 + 2 * 512 + 3 * 12 * 4)
    assert estimate.held == 5 * weights
    assert estimate.peak == estimate.held + estimate.activations + estimate.logits


def test_the_worst_stage_is_the_peak():
    parts = {name: 0 for name in ("weights", "reference", "gradients", "optimizer")}
    stages = {"cache": 5, "activations": 2, "logits": 4, "scratch": 3, "loading": 1}
    assert MemoryEstimate(**parts, **stages).peak == 6
    assert MemoryEstimate(**parts, **{**stages, "cache": 9}).peak == 9
    assert MemoryEstimate(**{**parts, "weights": 7}, **{**stages, "scratch": 8}).peak == 15
    assert MemoryEstimate(**{**parts, "weights": 7}, **{**stages, "loading": 14}).peak == 14  # instead of, not next to


def test_loading_counts_a_file_that_is_converted():
    model, config = load_policy("tiny")[0], GRPOConfig()
    weights = sum(weight.nbytes for weight in model.parameters())
    assert estimate_memory(model, config, prompt_length=8).loading == weights  # mapped as they stand in the file
    assert estimate_memory(model, config, prompt_length=8, file_bytes=100).loading == weights + 100


def test_half_a_billion_parameters_by_the_published_number():
    """Qwen2-0.5B has 494,032,768 weights; an empty model of its shape is made in no memory."""
    model = empty_model(QWEN2_05B)
    assert all(weight.is_meta for weight in model.parameters())
    full = estimate_memory(model, GRPOConfig(), prompt_length=128)
    assert full.weights == 4 * 494_032_768
    assert (
        estimate_memory(empty_model(QWEN2_05B, torch.bfloat16), GRPOConfig(), prompt_length=128).weights
        == full.weights / 2
    )


def test_what_each_saving_saves():
    model = empty_model(QWEN2_05B)
    shapes = {"prompt_length": 128, "completion_length": 64, "prompts_per_pass": 1}
    usual = estimate_memory(model, GRPOConfig(beta=0.1), **shapes)
    adafactor = estimate_memory(model, GRPOConfig(beta=0.1, optim="adafactor"), **shapes)
    assert adafactor.optimizer < usual.optimizer / 400 and adafactor.weights == usual.weights
    checkpointed = estimate_memory(model, GRPOConfig(beta=0.1, gradient_checkpointing=True), **shapes)
    assert checkpointed.activations < usual.activations / 5
    adapted = estimate_memory(add_lora(model, rank=16), GRPOConfig(beta=0.1), **shapes)
    assert adapted.gradients < usual.gradients / 50
    assert adapted.reference == 0 < usual.reference
    assert usual.weights < adapted.weights < 1.03 * usual.weights


def test_activations_grow_with_rows_and_logits_stop_growing_at_a_chunk():
    shape = ModelShape.of(empty_model(QWEN2_05B))
    assert activation_bytes(shape, 4, 100) == 4 * activation_bytes(shape, 1, 100)
    chunk = LOGITS_PER_CHUNK // 151936
    five, ten = (logits_bytes(shape, GRPOConfig(), n * chunk) for n in (5, 10))
    assert ten - five == 5 * chunk * 896 * 8  # hidden states alone
    assert ten - 151936 * 896 * 4 < 10 * chunk * 151936 * 4 / 5  # without the gradient of the output layer


def test_completions_that_share_beginnings_make_shorter_rows():
    model = empty_model(Qwen2Config(**SIZES))
    alone = estimate_memory(model, GRPOConfig(), prompt_length=20, completion_length=30)
    shared = estimate_memory(model, GRPOConfig(), prompt_length=20, completion_length=30, row_length=20 + 8 * 29)
    assert alone == shared
    half = estimate_memory(model, GRPOConfig(), prompt_length=20, completion_length=30, row_length=126)
    assert half.activations < alone.activations / 2 + 1 and half.cache == alone.cache


def test_the_table_has_a_line_a_part():
    lines = str(estimate_memory(empty_model(Qwen2Config(**SIZES)), GRPOConfig(), prompt_length=20)).splitlines()
    assert [line.split()[0] for line in lines][0] == "weights" and lines[-1].startswith("peak")
    assert len(lines) == 10 and all(line.endswith("GiB") for line in lines)


@pytest.mark.parametrize("name", ["prompt_length", "completion_length", "prompts_per_pass", "row_length"])
def test_lengths_below_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"^{name} .*got 0"):
        estimate_memory(empty_model(Qwen2Config(**SIZES)), GRPOConfig(), **{"prompt_length": 9, name: 0})


@pytest.mark.long
@pytest.mark.parametrize("case", ["tiny, the default run", "tiny, 32 prompts in 4 passes"])
def test_the_tiny_models_estimate_is_within_15_percent_of_the_measured_peak(case):
    command = [sys.executable, "-m", "benchmarks.memory", "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, cwd=REPOSITORY)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["estimate"] == pytest.approx(found["peak"], rel=0.15)
    assert found["peak"] > found["libraries"] + 50e6  # there is something to estimate
