"""Checkpoints: what is put back is what was there, bit for bit, and what cannot be put back is named."""

import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
from toy_policy import PROBLEMS, SMALL, late_letters_or_tie, make_batch, make_model, timeless, weights

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import add_lora
from grpo_edu.runs import checkpoint as checkpoints
from grpo_edu.runs.checkpoint import (
    fingerprint,
    latest_checkpoint,
    load_checkpoint,
    load_failed_batch,
    save_checkpoint,
    save_failed_batch,
)
from grpo_edu.trainer import start_training, train

CONFIG = GRPOConfig(**{**SMALL, "max_steps": 5}, learning_rate=1e-2)


def noisy_letters(completions, prompts, **kwargs):
    """A reward that also draws from the three global random states; prompts that start with q1 tie."""
    noise = (random.random() + np.random.rand() + torch.rand(()).item()) / 1000
    return [reward + noise for reward in late_letters_or_tie(completions, prompts)]


def train_on(model, tokenizer, config, folder, steps, stop_at=None):
    """Train; with `stop_at`, keep a checkpoint there and stop. Goes on from the checkpoint that the folder holds."""
    mark = fingerprint(model)
    state = start_training(model, tokenizer, PROBLEMS, config)
    place, history = latest_checkpoint(folder), []
    if place is not None:
        history = load_checkpoint(place, model, state, config, fingerprint=mark)
    for metrics in train(model, tokenizer, PROBLEMS, noisy_letters, config, state=state):
        history.append(metrics)
        if state.step == stop_at:
            save_checkpoint(folder, model, state, config, history, fingerprint=mark)
            break
    return history


def fresh(config, dtype, lora):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    model = make_model(dtype=dtype)
    torch.manual_seed(8)
    return add_lora(model, rank=2) if lora else model


@pytest.mark.parametrize(
    ("settings", "dtype", "lora"),
    [
        ({}, torch.float32, False),
        ({"beta": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 2, "num_iterations": 2}, torch.float32, False),
        ({"max_resamples": 2}, torch.float32, False),
        ({"rollout_lag": 2}, torch.float32, False),
        ({"rollout_lag": 1, "max_resamples": 2}, torch.float32, False),
        ({"optim": "adafactor", "shuffle_dataset": False}, torch.bfloat16, False),
        ({"lr_scheduler_type": "cosine"}, torch.float32, False),
        ({"beta": 0.1}, torch.float32, True),
        ({"memory_budget_gib": 64.0}, torch.bfloat16, False),
    ],
)
def test_a_training_that_goes_on_ends_the_same_bit_for_bit(tokenizer, tmp_path, settings, dtype, lora):
    config = GRPOConfig(**{**CONFIG.to_dict(), **settings})
    whole = fresh(config, dtype, lora)
    history = train_on(whole, tokenizer, config, tmp_path / "none", 5)
    train_on(fresh(config, dtype, lora), tokenizer, config, tmp_path, 5, stop_at=2)
    resumed = fresh(config, dtype, lora)
    torch.manual_seed(99)  # whatever the new process drew before
    random.seed(99)
    np.random.seed(99)
    again = train_on(resumed, tokenizer, config, tmp_path, 5)
    assert len(again) == 5 and timeless(again) == timeless(history)
    groups = [step.get("resampling/num_groups", 4) for step in history]
    assert len(set(groups)) > 1 or not config.max_resamples
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))
    if lora:
        assert sum("lora" in name for name, _ in resumed.named_parameters()) > 0


def one_checkpoint(tokenizer, folder, step=2):
    model = make_model()
    train_on(model, tokenizer, CONFIG, folder, 5, stop_at=step)
    return model


def test_a_checkpoint_holds_no_pickle_and_replaces_the_older(tokenizer, tmp_path):
    one_checkpoint(tokenizer, tmp_path)
    (tmp_path / ".step-3.77.tmp").mkdir()  # half of one, from a process that was killed
    model = make_model()
    train_on(model, tokenizer, CONFIG, tmp_path, 5, stop_at=4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    names = {path.name for path in (tmp_path / "step-4").iterdir()}
    assert names == {"weights.safetensors", "state.safetensors", "checkpoint.json"}
    index = json.loads((tmp_path / "step-4" / "checkpoint.json").read_text())
    assert index["step"] == 4 and len(index["history"]) == 4 and index["versions"]["torch"] == torch.__version__
    assert latest_checkpoint(tmp_path / "absent") is None


def test_a_metric_that_is_no_number_comes_back_as_such(tokenizer, tmp_path):
    model = make_model()
    state = start_training(model, tokenizer, PROBLEMS, CONFIG)
    place = save_checkpoint(tmp_path, model, state, CONFIG, [{"step": 1, "reward_std": math.nan}])
    assert "NaN" not in (place / "checkpoint.json").read_text()
    (step,) = load_checkpoint(place, model, start_training(model, tokenizer, PROBLEMS, CONFIG), CONFIG)
    assert step["step"] == 1 and math.isnan(step["reward_std"])


def cut(name):
    def apply(place):
        content = (place / name).read_bytes()
        (place / name).write_bytes(content[: len(content) // 2])

    return apply


def flip(place):
    content = bytearray((place / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (place / "weights.safetensors").write_bytes(bytes(content))


def other(**changes):
    def apply(place):
        index = json.loads((place / "checkpoint.json").read_text())
        (place / "checkpoint.json").write_text(json.dumps(index | changes))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("weights.safetensors"), r"step-2/weights\.safetensors is cut short: \d+ of \d+ bytes; delete .*step-2"),
        (cut("state.safetensors"), r"step-2/state\.safetensors is cut short"),
        (cut("checkpoint.json"), r"step-2/checkpoint\.json is missing or cut short"),
        (lambda place: (place / "checkpoint.json").unlink(), "missing or cut short"),
        (lambda place: (place / "state.safetensors").unlink(), "state.safetensors is cut short: 0 of"),
        (flip, r"weights\.safetensors is damaged"),
        (
            other(format=2, versions={"grpo_edu": "9.9"}),
            r"has format 2, written by grpo_edu 9\.9; this is grpo_edu .*"
            "reads format 1",
        ),
        (other(fingerprint="0"), "another model"),
        (other(config={**CONFIG.to_dict(), "beta": 0.5}), r"written with beta = 0\.5, now it is 0\.0"),
    ],
)
def test_what_cannot_be_put_back_is_named_and_changes_nothing(tokenizer, tmp_path, damage, message):
    one_checkpoint(tokenizer, tmp_path)
    damage(tmp_path / "step-2")
    model = make_model()
    state, before = start_training(model, tokenizer, PROBLEMS, CONFIG), weights(model)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "step-2", model, state, CONFIG, fingerprint=fingerprint(model))
    assert state.step == 0 and all(torch.equal(before[name], weight) for name, weight in weights(model).items())


def test_another_torch_is_a_warning(tokenizer, tmp_path):
    one_checkpoint(tokenizer, tmp_path)
    versions = json.loads((tmp_path / "step-2" / "checkpoint.json").read_text())["versions"]
    other(versions={**versions, "torch": "1.0"})(tmp_path / "step-2")
    model = make_model()
    with pytest.warns(RuntimeWarning, match=r"written with torch 1\.0, this is .*may not end exactly"):
        history = train_on(model, tokenizer, CONFIG, tmp_path, 5)
    assert len(history) == 5


def test_weights_that_are_not_finite_are_not_kept(tokenizer, tmp_path):
    model = one_checkpoint(tokenizer, tmp_path)
    state = start_training(model, tokenizer, PROBLEMS, CONFIG)
    state.step = 3
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="not finite after step 3"):
        save_checkpoint(tmp_path, model, state, CONFIG, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_disk_that_is_full_keeps_the_older_checkpoint(tokenizer, tmp_path, monkeypatch):
    model = one_checkpoint(tokenizer, tmp_path)
    state = start_training(model, tokenizer, PROBLEMS, CONFIG)
    state.step = 3

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoints, "_to_disk", full)
    with pytest.raises(OSError, match="could not write a checkpoint .*No space left") as caught:
        save_checkpoint(tmp_path, model, state, CONFIG, [])
    assert caught.value.errno == 28 and [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_a_failed_batch_can_be_looked_at_again(tokenizer, tmp_path):
    batch = make_batch(make_model(), tokenizer, CONFIG)
    save_failed_batch(tmp_path / "diagnosis", batch, step=3, error="not finite")
    again, step, error = load_failed_batch(tmp_path / "diagnosis")
    assert (step, error) == (3, "not finite") and again.rollout.completions == batch.rollout.completions
    assert torch.equal(again.advantages, batch.advantages) and torch.equal(again.loss_mask, batch.loss_mask)
    assert torch.equal(again.rollout.sampling_per_token_logps, batch.rollout.sampling_per_token_logps)
    shutil.rmtree(tmp_path / "diagnosis")
    with pytest.raises(FileNotFoundError, match="holds no batch.json"):
        load_failed_batch(tmp_path / "diagnosis")
