"""The memory monitor in fresh processes, failed allocations, and checkpointing that must really recompute."""

import json
import subprocess
import sys
import weakref
from contextlib import contextmanager

import pytest
import torch
from toy_policy import SMALL, make_batch, make_model, run, sgd, timeless, update_policy, weights
from transformers import GPT2Config, GPT2LMHeadModel

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.decoding import TreeDecoder
from grpo_edu.fast.lora import add_lora
from grpo_edu.fast.memory import PeakMemory, out_of_memory, recomputed_layers
from grpo_edu.rollout import generate

MB = 10**6


def in_a_fresh_process(program: str) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


# The monitor


def test_a_block_that_is_gone_again_still_counts_in_the_peak():
    found = in_a_fresh_process(
        "import json, time\n"
        "from grpo_edu.fast.memory import PeakMemory, resident_bytes\n"
        "with PeakMemory() as memory:\n"
        "    block = bytearray(200_000_000)\n"
        "    del block\n"
        "    time.sleep(0.1)\n"
        "print(json.dumps({'start': memory.start, 'peak': memory.peak, 'end': resident_bytes()}))"
    )
    assert 195 * MB < found["peak"] - found["start"] < 215 * MB
    assert found["end"] - found["start"] < 20 * MB


@pytest.mark.skipif(sys.platform == "win32", reason="Windows tells no high-water mark while a program runs")
def test_a_peak_between_two_looks_is_not_missed():
    found = in_a_fresh_process(
        "import json\n"
        "from grpo_edu.fast.memory import PeakMemory\n"
        "with PeakMemory(interval=60) as memory:\n"
        "    bytearray(200_000_000)\n"
        "print(json.dumps({'needed': memory.peak - memory.start}))"
    )
    assert 195 * MB < found["needed"] < 215 * MB


def test_children_count_and_count_once():
    """A child that holds 150 MB next to a parent with 100 MB: 250, though the forked child maps the parent's too."""
    found = in_a_fresh_process(
        "import json, subprocess, sys\n"
        "from grpo_edu.fast.memory import PeakMemory\n"
        "child = 'import time; block = bytearray(150_000_000); time.sleep(1.5)'\n"
        "with PeakMemory() as memory:\n"
        "    own = bytearray(100_000_000)\n"
        "    subprocess.run([sys.executable, '-c', child])\n"
        "print(json.dumps({'needed': memory.peak - memory.start}))"
    )
    assert 245 * MB < found["needed"] < 285 * MB  # a Python of its own takes some 10


def test_a_monitor_survives_an_error_inside_and_refuses_an_interval_of_zero():
    with pytest.raises(KeyError), PeakMemory() as memory:
        raise KeyError
    assert memory.peak >= memory.start > 0
    assert not memory._thread.is_alive()
    with pytest.raises(ValueError, match="interval .*got 0"):
        PeakMemory(interval=0)


# Failed allocations


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc keeps what others give back")
def test_freed_blocks_go_back_to_the_system_where_asked():
    """Without asking, it keeps all but some of the twenty blocks of 16 MB."""
    program = """
import json, torch
from grpo_edu.fast.memory import resident_bytes, return_large_blocks
asked = return_large_blocks()
torch.ones(7_500_000)  # 30 MB, freed at once: from now on glibc keeps blocks of this size
large, small = [], []
for _ in range(20):
    large.append(torch.ones(4_000_000))
    small.append(torch.ones(250_000))  # 1 MB: no hole that imports have left between earlier blocks takes it
before = resident_bytes()
large.clear()
print(json.dumps({"asked": asked, "returned": before - resident_bytes()}))
"""
    found = in_a_fresh_process(program)
    if not found["asked"]:
        pytest.skip("this C library has no mallopt")
    assert found["returned"] > 300 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc keeps what others give back")
def test_a_rollout_uses_freed_blocks_again_and_returns_them_after_it():
    program = """
import json, resource, torch
from grpo_edu.fast import memory
asked, memory.LARGE_MODEL = memory.return_large_blocks(), 1
def faults():
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(4_000_000)  # 16 MB, freed at once
        yield resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
outside, size = list(faults()), memory.resident_bytes()
with memory.large_blocks_kept(torch.nn.Linear(1, 1)):
    inside = list(faults())
kept = memory.resident_bytes() - size
print(json.dumps({"asked": asked, "outside": sum(outside[20:]), "inside": sum(inside[20:]), "kept": kept}))
"""
    found = in_a_fresh_process(program)
    if not found["asked"]:
        pytest.skip("this C library has no mallopt")
    assert found["inside"] < found["outside"] / 5
    assert found["kept"] < 8 * MB


def test_the_cache_of_a_rollout_is_gone_before_its_blocks_are_returned(monkeypatch, tokenizer):
    """Freed later, it stayed in glibc's heap: 0.26 GiB in each step with SmolLM2."""
    caches, left = [], []

    def make(*arguments):
        caches.append(weakref.ref(decoder := TreeDecoder(*arguments)))
        return decoder

    @contextmanager
    def kept(model):
        yield
        left.append(caches[-1]())

    monkeypatch.setattr("grpo_edu.fast.decoding.TreeDecoder", make)
    monkeypatch.setattr("grpo_edu.rollout.large_blocks_kept", kept)
    generate(make_model(), tokenizer, ["a b"], num_generations=2, max_completion_length=4)
    assert left == [None]


def test_a_real_failed_allocation_is_recognized():
    with pytest.raises((RuntimeError, MemoryError)) as failure:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(failure.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("memory"), OSError()]
)
def test_other_errors_are_not(error):
    assert not out_of_memory(error)


# Checkpointing


def gradients_and_calls(model, tokenizer, config):
    """Gradients of one update, how often a layer's MLP began, and bytes that autograd kept."""
    batch = make_batch(model, tokenizer, config)
    calls, kept = [], {}
    hook = model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        update_policy(model, batch, sgd(model), config)
    hook.remove()
    return weights(model), len(calls), sum(kept.values())


@pytest.mark.parametrize("with_adapters", [False, True])
def test_checkpointing_acts_in_eval_mode_and_changes_nothing_but_memory(tokenizer, with_adapters):
    """transformers' own switch acts in training mode alone; the policy is in eval mode."""
    found = {}
    for active in (False, True):
        model = make_model(num_hidden_layers=6)
        if with_adapters:
            torch.manual_seed(1)
            model = add_lora(model, rank=2)
        model.eval()
        config = GRPOConfig(**SMALL, gradient_checkpointing=active)
        found[active] = gradients_and_calls(model, tokenizer, config)
        assert not any("forward" in module.__dict__ for module in model.modules())
    (plain, once, much), (checkpointed, twice, little) = found[False], found[True]
    torch.testing.assert_close(plain, checkpointed, atol=1e-12, rtol=0.0)
    assert (once, twice) == (1, 2)
    assert little < much / 3


def test_checkpointing_holds_for_a_whole_run_and_leaves_the_rollout_alone(tokenizer):
    options = {**SMALL, "learning_rate": 0.01, "num_iterations": 2, "beta": 0.05}
    plain, history = run(tokenizer, GRPOConfig(**options))
    checkpointed, other = run(tokenizer, GRPOConfig(**options, gradient_checkpointing=True))
    torch.testing.assert_close(weights(plain), weights(checkpointed), atol=1e-9, rtol=0.0)
    for row, same in zip(timeless(history), timeless(other), strict=True):
        assert row == pytest.approx(same, abs=1e-9)


def test_a_wrapped_layer_is_itself_again_after_an_error():
    model = make_model()
    with pytest.raises(KeyError), recomputed_layers(model):
        raise KeyError
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_other_architectures_are_checkpointed_and_what_has_no_layers_is_refused():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=15, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=1)
    ).eval()
    calls = []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with recomputed_layers(model):
        loss = model(torch.tensor([[3, 4, 5]])).logits.square().sum()
    loss.backward()
    assert len(calls) == 2
    with pytest.raises(ValueError, match="model Linear has no layers.*gradient_checkpointing=False"):
        recomputed_layers(torch.nn.Linear(1, 1)).__enter__()
