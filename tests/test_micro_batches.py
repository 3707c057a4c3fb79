"""Passes cut to fit: the same result however a batch is cut, budgets, and memory that runs out on the way."""

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from toy_policy import (
    PROBLEMS,
    SMALL,
    assert_same_weights,
    late_letters,
    late_letters_or_tie,
    make_batch,
    make_model,
    run,
    sgd,
    update_policy,
    weights,
)

from grpo_edu import trainer
from grpo_edu.config import LOSS_TYPES, GRPOConfig
from grpo_edu.fast.memory import GIB, resident_bytes
from grpo_edu.fast.micro_batches import MicroBatches, pass_budget
from grpo_edu.losses import LOSSES
from grpo_edu.trainer import longest_prompt, train

CONFIG = GRPOConfig(**SMALL, max_grad_norm=1e9)  # four groups of four rows


@pytest.fixture
def batch(tokenizer):
    return make_batch(make_model(), tokenizer, CONFIG)


def cut(micro_batches, batch):
    """The micro-batches of the rows that have a gradient."""
    return micro_batches.cut(batch.rollout, trainer.rows_with_gradient(batch, micro_batches.config))


def room_for(batch, rows, config=CONFIG):
    """As many bytes as a pass over these rows needs."""
    return MicroBatches(make_model(), config).bytes_of(batch.rollout, torch.tensor(rows))


def allocation_fails_above(monkeypatch, most, kind=MemoryError, when=lambda: True):
    """Let a pass over more than `most` rows fail, as it does where memory is short."""
    tried, micro_batch_loss = [], trainer.micro_batch_loss

    def short_of_memory(update, rows):
        tried.append(len(rows))
        if len(rows) > most and when():
            raise kind("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes.")
        return micro_batch_loss(update, rows)

    monkeypatch.setattr(trainer, "micro_batch_loss", short_of_memory)
    return tried


# Cutting


def test_with_room_enough_a_batch_is_one_part_in_its_own_order(batch):
    (part,) = cut(MicroBatches(make_model(), CONFIG), batch)
    assert part.tolist() == list(range(16))


def test_parts_hold_whole_groups_once_each_and_the_longest_first(batch):
    room = 2.2 * max(room_for(batch, list(range(first, first + 4))) for first in (0, 4, 8, 12))
    passes = MicroBatches(make_model(), CONFIG, room)
    parts = cut(passes, batch)
    assert 1 < len(parts) < 4
    assert torch.cat(parts).sort().values.tolist() == list(range(16))
    assert all(passes.bytes_of(batch.rollout, part) <= room for part in parts)
    groups = [group for part in parts for group in part.view(-1, 4).tolist()]
    assert all(group == list(range(group[0], group[0] + 4)) for group in groups)
    lengths = (batch.rollout.prompt_mask.sum(1) + 4 * batch.rollout.completion_mask.sum(1)).tolist()
    sizes = [sum(lengths[row] for row in group) for group in groups]
    assert sizes[0] == max(sizes)


def test_a_group_that_does_not_fit_is_cut_into_halves_and_quarters(batch):
    one = max(room_for(batch, [row]) for row in range(16))
    parts = cut(MicroBatches(make_model(), CONFIG, one), batch)
    assert torch.cat(parts).sort().values.tolist() == list(range(16))
    assert {len(part) for part in parts} <= {1, 2} and any(len(part) == 1 for part in parts)
    assert [len(part) for part in cut(MicroBatches(make_model(), CONFIG, 0), batch)] == [1] * 16


def test_accumulation_steps_are_a_least_number_of_parts(batch):
    config = GRPOConfig(**SMALL, gradient_accumulation_steps=2)
    assert [len(part) for part in cut(MicroBatches(make_model(), config), batch)] == [8, 8]


def test_tied_groups_are_left_out(tokenizer):
    batch = make_batch(make_model(), tokenizer, CONFIG, late_letters_or_tie, PROBLEMS[2:6])
    assert torch.cat(cut(MicroBatches(make_model(), CONFIG, 0), batch)).sort().values.tolist() == list(range(8))


@pytest.mark.parametrize("level", ["token", pytest.param("sequence", marks=pytest.mark.long)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_single_rows_give_what_the_whole_batch_gives(tokenizer, loss_type, level):
    options = {**SMALL, "num_iterations": 2, "beta": 0.05, "epsilon": 0.01, "max_grad_norm": 1e9}
    options |= {"loss_type": loss_type, "importance_sampling_level": level}
    options |= {"epsilon_high": 0.9 if LOSSES[loss_type].clips == "weight" else 0.01}
    config = GRPOConfig(**options, mask_truncated_completions=True)
    whole, single = make_model(), make_model()
    batch, reference = make_batch(whole, tokenizer, config), make_model()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(1.1)
    expected = update_policy(whole, batch, sgd(whole, 0.1), config, reference=reference)
    found = update_policy(
        single, batch, sgd(single, 0.1), config, reference=reference, micro_batches=MicroBatches(single, config, 0)
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert not LOSSES[loss_type].clips or any(value > 0 for key, value in found.items() if "clip_ratio" in key)
    assert_same_weights(whole, single)


def test_a_model_without_block_masks_is_trained_all_the_same_with_a_word(tokenizer, batch):
    """A sliding window that no single row reaches and every packed row exceeds."""
    single = batch.rollout.prompt_mask.sum(1) + batch.rollout.completion_mask.sum(1) - 1
    window = int(single.max())
    plain, windowed = make_model(), make_model(use_sliding_window=True, sliding_window=window, max_window_layers=0)
    metrics = update_policy(plain, batch, sgd(plain), CONFIG)
    with pytest.warns(RuntimeWarning, match=f"sliding window of {window} tokens.*once per completion"):
        assert update_policy(windowed, batch, sgd(windowed), CONFIG) == pytest.approx(metrics)
    assert_same_weights(plain, windowed)


# Memory that runs out


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
@pytest.mark.parametrize("most", [8, 3, 1])
def test_passes_are_halved_until_they_fit_and_the_result_is_the_same(tokenizer, monkeypatch, batch, kind, most):
    whole, halved = make_model(), make_model()
    expected = update_policy(whole, batch, sgd(whole), CONFIG)
    tried = allocation_fails_above(monkeypatch, most, kind)
    passes = MicroBatches(halved, CONFIG)
    with pytest.warns(RuntimeWarning, match="memory ran out .*16 completions.*smaller"):
        found = update_policy(halved, batch, sgd(halved), CONFIG, micro_batches=passes)
    assert tried[0] == 16 and max(tried[-3:]) <= most
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_weights(whole, halved)
    tried.clear()
    update_policy(halved, batch, sgd(halved), CONFIG, micro_batches=passes)
    assert max(tried) <= most  # it has learned how much there is


def test_what_a_failed_pass_left_in_the_gradient_is_not_counted(tokenizer, monkeypatch, batch):
    """The second of two passes fails in its backward pass, half of its gradient being there already."""
    whole, broken = make_model(), make_model()
    config = GRPOConfig(**SMALL, max_grad_norm=1e9, gradient_accumulation_steps=2)
    expected = update_policy(whole, batch, sgd(whole), config)
    backwards = []

    def fail_once(gradient):
        backwards.append(gradient)
        if len(backwards) == 2:
            raise MemoryError

    broken.get_input_embeddings().register_full_backward_hook(lambda module, inputs, outputs: fail_once(outputs))
    with pytest.warns(RuntimeWarning, match="memory ran out .*8 completions"):
        found = update_policy(broken, batch, sgd(broken), config)
    assert len(backwards) > 4
    assert found == pytest.approx(expected, rel=1e-6)
    assert_same_weights(whole, broken)


def test_memory_that_shrinks_in_the_middle_of_a_run_changes_nothing(tokenizer, monkeypatch):
    config = GRPOConfig(**{**SMALL, "max_steps": 4}, learning_rate=0.01)
    usual, history = run(tokenizer, config)
    shrunk, steps = make_model(), []
    tried = allocation_fails_above(monkeypatch, 4, when=lambda: len(steps) >= 2)
    with pytest.warns(RuntimeWarning, match="memory ran out"):
        for row in train(shrunk, tokenizer, PROBLEMS, late_letters, config):
            steps.append(row)
    assert tried[:2] == [16, 16] and max(tried[-4:]) == 4
    assert_same_weights(usual, shrunk)
    assert [row["loss"] for row in steps] == pytest.approx([row["loss"] for row in history], abs=1e-9)


def test_a_single_completion_that_is_too_much_is_an_error_that_says_what_to_do(tokenizer, monkeypatch, batch):
    allocation_fails_above(monkeypatch, 0)
    model = make_model()
    with pytest.warns(RuntimeWarning), pytest.raises(MemoryError, match="gradient_checkpointing=True.*add_lora"):
        update_policy(model, batch, sgd(model), CONFIG)
    assert_same_weights(model, make_model(), tolerance=0.0)


def test_another_error_is_raised_as_it_is(tokenizer, monkeypatch, batch):
    def broken(*arguments):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(trainer, "micro_batch_loss", broken)
    model = make_model()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        update_policy(model, batch, sgd(model), CONFIG)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the address space is Linux's")
def test_a_limited_address_space_is_survived(tmp_path):
    """A real allocation fails in a real process; the update is that of a process without a limit."""
    results = {}
    for limited in (False, True):
        target = tmp_path / f"{limited}.json"
        program = Path(__file__).with_name("short_of_memory.py")
        command = [sys.executable, str(program), str(target), *(["--limited"] if limited else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-2000:]
        results[limited] = json.loads(target.read_text())
    assert results[False]["warnings"] == []
    assert any("memory ran out" in text for text in results[True]["warnings"])
    assert results[True]["metrics"] == pytest.approx(results[False]["metrics"], rel=1e-4, abs=1e-6)
    assert_close(torch.tensor(results[True]["moved"]), torch.tensor(results[False]["moved"]), rtol=1e-3, atol=1e-7)


# Budgets


def test_a_budget_too_small_names_the_smallest_that_works_and_that_one_works(tokenizer):
    config = GRPOConfig(**SMALL, memory_budget_gib=0.001)
    with pytest.raises(ValueError, match=r"memory_budget_gib = 0.001 .*smallest that works is") as error:
        run(tokenizer, config)
    smallest = float(str(error.value).split("works is ")[1].split()[0])
    assert resident_bytes() / GIB < smallest < resident_bytes() / GIB + 0.1
    usual, _ = run(tokenizer, GRPOConfig(**SMALL))
    tight, _ = run(tokenizer, GRPOConfig(**SMALL, memory_budget_gib=smallest + 0.05))
    assert_same_weights(usual, tight)


def test_a_budget_decides_how_a_batch_is_cut(tokenizer, monkeypatch, batch):
    """With the process held at 2 GiB, what is left of a budget is what gradients and AdamW do not take."""
    monkeypatch.setattr("grpo_edu.fast.micro_batches.resident_bytes", lambda: 2 * GIB)
    model = make_model()
    trained = sum(weight.nbytes for weight in model.parameters())
    config = GRPOConfig(**SMALL, memory_budget_gib=2.5)
    assert pass_budget(model, config, longest_prompt=4) == GIB / 2 - 3 * trained


def test_without_a_budget_the_machine_decides(monkeypatch):
    model, config = make_model(), GRPOConfig(**SMALL)
    trained = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr("grpo_edu.fast.micro_batches.memory_bytes", lambda: (8 * GIB, 4 * GIB))
    assert pass_budget(model, config, 0) == pytest.approx(0.9 * 4 * GIB - 3 * trained)


def test_the_longest_prompt_is_found(tokenizer):
    assert longest_prompt(tokenizer, PROBLEMS) == 4
    assert math.isfinite(longest_prompt(tokenizer, PROBLEMS[:1]))


def test_a_copy_of_a_batch_is_left_as_it_was(tokenizer, batch):
    before = copy.deepcopy(batch)
    model = make_model()
    update_policy(model, batch, sgd(model), CONFIG, micro_batches=MicroBatches(model, CONFIG, 0))
    assert torch.equal(batch.advantages, before.advantages)
    assert torch.equal(batch.rollout.completion_ids, before.rollout.completion_ids)
    assert set(weights(model)) == set(weights(make_model()))
