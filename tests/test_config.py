"""The settings of a run, and the same bounds for functions that are called directly."""

import dataclasses
import json
import math
from functools import partial
from inspect import isfunction, signature

import pytest
import torch

from grpo_edu import evaluation
from grpo_edu.config import ARGUMENTS, RETIRED, GRPOConfig, drop_retired, field_bounds
from grpo_edu.continual import ewc, fisher
from grpo_edu.continual.ewc import Anchor, anchor_penalty, ewc_penalty, merge_anchors
from grpo_edu.continual.fisher import fisher_diagonal
from grpo_edu.evaluation import crossed_bootstrap, paired_bootstrap, wilson_interval
from grpo_edu.losses import LOSSES
from grpo_edu.studies import power
from grpo_edu.studies.power import (
    coverage,
    mcnemar_power,
    mcnemar_range,
    normal_interval,
    possible_counts,
    problems_needed_paired,
    problems_needed_unpaired,
)

REFUSED = {
    "num_generations": [1, 2.5],
    "prompts_per_step": [0, "16"],
    "max_resamples": [-1],
    "max_completion_length": [0, 1.5, None],
    "max_steps": [0, True],
    "learning_rate": [0.0, math.nan, math.inf, "1e-4"],
    "weight_decay": [-0.1],
    "max_grad_norm": [-1.0],
    "lr_scheduler_type": ["cosinus"],
    "warmup_steps": [-1],
    "num_iterations": [0],
    "gradient_accumulation_steps": [3, 0],
    "temperature": [0.0, -1.0],
    "top_p": [0.0, 1.1],
    "top_k": [-1],
    "loss_type": ["ppo"],
    "importance_sampling_level": ["word"],
    "epsilon": [-0.2],
    "epsilon_high": [-0.2, math.nan],
    "use_bias_correction_kl": ["yes"],
    "entropy_coef": [-0.1],
    "beta": [-0.04, math.nan],
    "scale_rewards": ["std"],
    "advantage_estimator": ["gae"],
    "reward_weights": [[1.0, math.nan], 1.0],
    "seed": [0.5, 2**64, -(2**63) - 1],
    "optim": ["adam"],
    "memory_budget_gib": [0.0, math.inf, "2"],
    "rollout_quantization": ["int3"],
    "rollout_lag": [-1, 0.5, 40],
    "importance_sampling_clip_max": [0.0, None],
    "abort_grad_norm": [0.0, math.nan, "big"],
    "shuffle_dataset": ["no"],
    "mask_truncated_completions": [1],
    "gradient_checkpointing": ["yes"],
    "importance_sampling_correction": [0],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_a_setting_that_cannot_be_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} .*got "):
        GRPOConfig(**{name: value})


LINEAR = torch.nn.Linear(2, 1, bias=False)
BY_HAND = {"weight": torch.ones(1, 2)}
# What a notebook or a student calls directly → how, with all arguments that may be left out by name.
CALLED = {
    ewc_penalty: partial(ewc_penalty, LINEAR, BY_HAND, BY_HAND),
    anchor_penalty: partial(anchor_penalty, [Anchor(BY_HAND, BY_HAND)]),
    merge_anchors: partial(merge_anchors, Anchor(BY_HAND, BY_HAND), Anchor(BY_HAND, BY_HAND)),
    fisher_diagonal: partial(fisher_diagonal, LINEAR, [(torch.ones(1, 2), torch.tensor([0]))]),
    wilson_interval: partial(wilson_interval, 1, trials=2),
    crossed_bootstrap: partial(crossed_bootstrap, [[1.0, 0.0]] * 2, [[1.0, 1.0]] * 2),
    paired_bootstrap: partial(paired_bootstrap, [1.0, 0.0], [1.0, 1.0]),
    mcnemar_power: partial(mcnemar_power, 0.1, 0.2, trials=10),
    problems_needed_paired: partial(problems_needed_paired, 0.1, 0.2),
    problems_needed_unpaired: partial(problems_needed_unpaired, 0.1, 0.2),
    coverage: partial(coverage, wilson_interval, share=0.5, trials=2),
    normal_interval: partial(normal_interval, 1),
    possible_counts: partial(possible_counts, 50.0),
    mcnemar_range: partial(mcnemar_range, 1, 2),
}


def numbers_of(function):
    """The arguments of a function whose names have an interval.

    Without seeds: those of numpy are other numbers than those of torch.
    """
    return {*signature(function).parameters} & ({*ARGUMENTS} - {"seed"})


def test_no_function_with_such_an_argument_is_forgotten():
    for module in (ewc, fisher, evaluation, power):
        for name, function in vars(module).items():
            own = isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
            if own and numbers_of(function) and not {"model", "head"} & {*signature(function).parameters}:
                assert function in CALLED, name


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in CALLED for name in sorted(numbers_of(function))]
)
def test_a_function_that_is_called_directly_refuses_a_number_out_of_its_interval(function, name):
    for value in (-5, math.nan, "0.2", True):
        with pytest.raises(ValueError, match=rf"^{name} must .*got .*{value}"):
            CALLED[function](**{name: value})


def test_every_default_is_allowed_by_its_field():
    """A default is not looked at when settings are made, so that the tables of names need not be imported."""
    for name, bound in field_bounds(GRPOConfig).items():
        default = getattr(GRPOConfig(), name)
        if default is not None:
            bound.check(name, default)


def test_a_fisher_diagonal_is_a_mean_of_squares():
    for entry in (-1.0, math.nan, math.inf):
        wrong = {"weight": torch.tensor([[1.0, entry]])}
        for use in (partial(ewc_penalty, LINEAR, wrong, BY_HAND, ewc_lambda=1.0), partial(Anchor, wrong, BY_HAND)):
            with pytest.raises(ValueError, match=rf"^fisher: 'weight' .*{entry:g}"):
                use()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "cispo"}, r"^epsilon_high .*'cispo'.*epsilon_high=5\.0"),
        ({"warmup_steps": 3}, r"^warmup_steps .*got 3.*'constant_with_warmup'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_with_a_way_out(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**settings)
    assert GRPOConfig(loss_type="cispo", epsilon_high=5.0).epsilon_high == 5.0
    assert GRPOConfig(warmup_steps=3, lr_scheduler_type="constant_with_warmup").warmup_steps == 3


def test_every_setting_has_a_test_of_refusal():
    assert {field.name for field in dataclasses.fields(GRPOConfig)} == set(REFUSED)


def test_settings_go_through_json_and_cannot_be_changed():
    config = GRPOConfig(reward_weights=[1.0, 0.2], epsilon_high=0.28, seed=4)
    assert config.reward_weights == (1.0, 0.2)
    assert GRPOConfig(**json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    assert GRPOConfig(num_generations=3, prompts_per_step=5).batch_size == 15


def test_the_names_are_trls_where_trl_has_one():
    import trl

    theirs = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    own = {"prompts_per_step", "max_resamples", "advantage_estimator", "memory_budget_gib"}
    theirs |= {name.removeprefix("vllm_") for name in theirs}  # what corrects for a policy of another kind that samples
    own |= {"rollout_quantization", "rollout_lag", "abort_grad_norm"}
    assert {field.name for field in dataclasses.fields(GRPOConfig)} - theirs == own


def test_a_stored_run_with_a_retired_setting_is_read_only_at_its_default(monkeypatch):
    before = {**GRPOConfig().to_dict(), **RETIRED}
    assert GRPOConfig(**drop_retired(before)) == GRPOConfig()
    assert not set(RETIRED) & set(GRPOConfig().to_dict())
    for name, value in {**dict.fromkeys(RETIRED, 7), "loss_type": "sapo"}.items():
        with pytest.raises(ValueError, match=rf"{name} = {value!r}, which only grpo_edu 0\.3\.0"):
            drop_retired({**before, name: value})
    monkeypatch.setitem(LOSSES, "sapo", LOSSES["grpo"])  # somebody adds it again
    assert drop_retired({**before, "loss_type": "sapo"})["loss_type"] == "sapo"
