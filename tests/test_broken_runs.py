"""The twelve cases: each is one fault, injected into the real trainer and gone when the step is over."""

from dataclasses import replace

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from grpo_edu import trainer
from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import make_problems
from grpo_edu.studies.broken_runs import CASES, HEALTHY, Setup, difference, find, mended_arm, run

SMALL = GRPOConfig(num_generations=2, prompts_per_step=2, max_completion_length=8, max_steps=2, learning_rate=1e-2)


def evenness_reward(completions, **kwargs):
    return [float(len(text) % 2) + 0.1 * len(text) for text in completions]


@pytest.fixture
def policy():
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, max_position_embeddings=1024, stop_ids=range(0, 256, 16)), tokenizer


@pytest.fixture(scope="module")
def problems():
    return make_problems("basic", 8, seed=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_one_thing_wrong_and_says_so(case):
    parts = ("config", "reward_funcs", "stages")
    assert sum(getattr(case.broken, part) != getattr(case.mended, part) for part in parts) == 1
    assert case.mended.stages == trainer.Stages(), "the mended run is the trainer as it stands"
    assert case.fault.endswith(".")
    assert all(len(line) <= 88 for line in difference(case).splitlines()), "a notebook's cell would clip it"


def test_difference_shows_the_settings_and_the_source():
    assert difference(find("lr too high")) == "learning_rate: 0.01 where 0.0002 is right"
    text = difference(find("std float trap"))
    assert "the stage 'advantages':" in text and "+ 1e-8" in text
    assert "the stage 'rows':" in text and "def every_row" in text
    assert "where accuracy_reward is right" in difference(find("reward always 0"))


def test_find_names_what_there_is():
    with pytest.raises(ValueError, match="name: 'plague' is not a case; choose one of reward always 0"):
        find("plague")


def test_every_mended_arm_is_one_setup():
    setups = {}
    for case in CASES:
        assert setups.setdefault(mended_arm(case), case.mended) == case.mended
    assert setups["healthy"] is HEALTHY


def test_run_without_a_fault_is_the_trainer(policy, problems):
    model, tokenizer = policy
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ours = list(run(Setup(SMALL, (evenness_reward,)), model, tokenizer, problems))
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    theirs = list(trainer.train(model, tokenizer, problems, evenness_reward, SMALL))
    for (metrics, batch), wanted in zip(ours, theirs, strict=True):
        assert {**metrics, "step_time": 0} == {**wanted, "step_time": 0}
        assert batch.rewards.mean().item() == pytest.approx(wanted["reward"])
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
    assert any(not torch.equal(after[name], start[name]) for name in start), "nothing was trained"


def test_a_stand_in_acts_on_the_steps(policy, problems):
    setup = replace(find("mask off by one").broken, config=SMALL, reward_funcs=(evenness_reward,))
    for _, batch in run(setup, *policy, problems):
        assert not batch.loss_mask[:, 0].any() and batch.rollout.completion_mask[:, 0].all()


def test_stale_old_logps_clip_from_the_second_step_on(policy, problems):
    case = find("stale old log-probabilities")
    config = replace(SMALL, beta=case.broken.config.beta, max_steps=3)
    setup = replace(case.broken, config=config, reward_funcs=(evenness_reward,))
    clipped = [metrics["clip_ratio/region_mean"] for metrics, _ in run(setup, *policy, problems)]
    assert clipped[0] == 0 and clipped[2] > 0


def test_what_the_trainer_refuses_comes_out(policy, problems):
    with pytest.raises(ValueError, match="problems"):
        next(run(HEALTHY, *policy, problems[:1]))
