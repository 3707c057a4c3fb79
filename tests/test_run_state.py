"""The state of a run: what is restored is what was there, bit for bit, and what cannot be restored is named."""

import math
import random
import shutil
from contextlib import suppress

import numpy as np
import pytest
import torch
from small_policy import fill
from toy_policy import PROBLEMS, SMALL, late_letters_or_tie, make_batch, make_model, timeless, weights

from grpo_edu.config import GRPOConfig
from grpo_edu.fast.lora import add_lora
from grpo_edu.runs.state import (
    check_same_model,
    check_same_settings,
    fingerprint,
    load_failed_batch,
    load_state,
    pack_training,
    read_random_states,
    restore_training,
    save_failed_batch,
    save_state,
    warn_of_other_versions,
)
from grpo_edu.trainer import start_training, train

CONFIG = GRPOConfig(**{**SMALL, "max_steps": 5}, learning_rate=1e-2)


def noisy_letters(completions, prompts, **kwargs):
    """A reward that also draws from the three global random states; prompts that start with q1 tie."""
    noise = (random.random() + np.random.rand() + torch.rand(()).item()) / 1000
    return [reward + noise for reward in late_letters_or_tie(completions, prompts)]


def train_on(model, tokenizer, config, file, stop_at=None):
    """Train; with `stop_at`, save the state there and stop. Goes on from the state in the file, if there is one."""
    state, history = start_training(model, tokenizer, PROBLEMS, config), []
    if file.exists():
        stored = load_state(file)
        restore_training(model, state, stored["training"], file)
        history = stored["history"]
    for metrics in train(model, tokenizer, PROBLEMS, noisy_letters, config, state=state):
        history.append(metrics)
        if state.step == stop_at:
            training = pack_training(model, state, read_random_states(state.generator))
            save_state(file, {"history": history, "training": training})
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
    history = train_on(whole, tokenizer, config, tmp_path / "none")
    train_on(fresh(config, dtype, lora), tokenizer, config, tmp_path / "state.pt", stop_at=2)
    resumed = fresh(config, dtype, lora)
    torch.manual_seed(99)  # whatever the new process drew before
    random.seed(99)
    np.random.seed(99)
    again = train_on(resumed, tokenizer, config, tmp_path / "state.pt")
    assert len(again) == 5 and timeless(again) == timeless(history)
    groups = [step.get("resampling/num_groups", 4) for step in history]
    assert len(set(groups)) > 1 or not config.max_resamples
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))
    if lora:
        assert sum("lora" in name for name, _ in resumed.named_parameters()) > 0


@pytest.fixture
def file(tokenizer, tmp_path):
    """The state after two steps."""
    train_on(make_model(), tokenizer, CONFIG, tmp_path / "state.pt", stop_at=2)
    return tmp_path / "state.pt"


def test_opening_a_state_runs_no_code(file):
    class Harmful:
        def __reduce__(self):
            return print, ("harm",)

    torch.save({"format": 2, "harm": Harmful()}, file)
    with pytest.raises(ValueError, match=r"state\.pt is damaged"):
        load_state(file)


def test_metrics_that_are_no_numbers_come_back(tmp_path):
    save_state(tmp_path / "state.pt", {"history": [{"step": 1, "reward_std": math.nan}]})
    (step,) = load_state(tmp_path / "state.pt")["history"]
    assert math.isnan(step["reward_std"]) and [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_state_that_is_cut_short_is_refused(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=rf"{file} is damaged or cut short; delete {file}, and the run starts again"):
        load_state(file)


def test_one_byte_that_changed_is_noticed(file):
    content = bytearray(file.read_bytes())
    for place in random.Random(0).sample(range(len(content) // 2), 5):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(bytes(changed))
        with suppress(ValueError):  # a byte between the records of the archive means nothing
            stored = load_state(file)["training"]["weights"]
            file.write_bytes(bytes(content))
            whole = load_state(file)["training"]["weights"]
            assert all(torch.equal(weight, stored[name]) for name, weight in whole.items())


def test_a_state_of_a_later_version_is_refused(file):
    torch.save({**load_state(file), "format": 3, "versions": {"grpo_edu": "9.9"}}, file)
    with pytest.raises(ValueError, match=r"has format 3, written by grpo_edu 9\.9; this is grpo_edu .*reads format 2"):
        load_state(file)


def test_a_state_of_another_run_is_refused_and_changes_nothing(tokenizer, file):
    with pytest.raises(ValueError, match="started from another model"):
        check_same_model("0", fingerprint(make_model()), file)
    with pytest.raises(ValueError, match=r"written with beta = 0\.5, now it is 0\.0"):
        check_same_settings({**CONFIG.to_dict(), "beta": 0.5}, CONFIG, file)
    check_same_settings({name: value for name, value in CONFIG.to_dict().items() if name != "beta"}, CONFIG, file)
    torch.manual_seed(8)
    model = add_lora(make_model(), rank=2)
    state, before = start_training(model, tokenizer, PROBLEMS, CONFIG), weights(model)
    with pytest.raises(ValueError, match="not those that learn here"):
        restore_training(model, state, load_state(file)["training"], file)
    assert state.step == 0 and all(torch.equal(before[name], weight) for name, weight in weights(model).items())


def test_another_torch_is_a_warning(file):
    with pytest.warns(RuntimeWarning, match=r"saved with torch 1\.0, this is .*may not end exactly"):
        warn_of_other_versions({**load_state(file)["versions"], "torch": "1.0"})


def test_weights_that_are_not_finite_are_not_saved(tokenizer):
    model = make_model()
    state = start_training(model, tokenizer, PROBLEMS, CONFIG)
    state.step = 3
    with torch.no_grad():
        next(model.parameters())[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="not finite after step 3"):
        pack_training(model, state, {})


def test_a_disk_that_is_full_keeps_the_older_state(file, small_disk):
    """The disk itself says it, not a function that was replaced."""
    place = small_disk / "state.pt"
    save_state(place, {"history": [1]})
    fill(small_disk)
    with pytest.raises(OSError, match="could not write the state .*No space left") as caught:
        save_state(place, load_state(file))
    assert caught.value.errno == 28 and load_state(place)["history"] == [1]
    assert {path.name for path in small_disk.iterdir()} == {"state.pt", "filler"}


def test_a_failed_batch_can_be_looked_at_again(tokenizer, tmp_path):
    batch = make_batch(make_model(), tokenizer, CONFIG)
    save_failed_batch(tmp_path / "diagnosis", batch, step=3, error="not finite")
    again, step, error = load_failed_batch(tmp_path / "diagnosis")
    assert (step, error) == (3, "not finite") and again.rollout.completions == batch.rollout.completions
    assert torch.equal(again.advantages, batch.advantages) and torch.equal(again.loss_mask, batch.loss_mask)
    assert torch.equal(again.rollout.sampling_per_token_logps, batch.rollout.sampling_per_token_logps)
    shutil.rmtree(tmp_path / "diagnosis")
    with pytest.raises(FileNotFoundError, match="holds no batch.pt"):
        load_failed_batch(tmp_path / "diagnosis")
