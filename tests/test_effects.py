"""Options without an effect are errors: the table is compared with what training really does, over all pairs."""

import json
import re
from functools import cache

import pytest
import torch
from toy_policy import CAP, PROBLEMS, late_letters, make_model, timeless, weights, word_tokenizer

from grpo_edu.cli.main import main
from grpo_edu.config import LOSS_TYPES, GRPOConfig
from grpo_edu.continual.stages import load_curriculum
from grpo_edu.losses import LOSSES as TABLE
from grpo_edu.runs.effects import RUN_NEEDS, reject_ineffective_options
from grpo_edu.runs.options import CONFIG_FIELDS, RunConfig
from grpo_edu.trainer import train

SMALL = {"num_generations": 3, "prompts_per_step": 2, "max_completion_length": 8, "max_steps": 2, "learning_rate": 0.02}
# A value of each setting that must show in the numbers of a run of this size.
TELLING = {
    "num_generations": [4],
    "prompts_per_step": [3],
    "max_resamples": [2],
    "max_completion_length": [3],
    "max_steps": [1],
    "learning_rate": [0.01],
    "weight_decay": [0.5],
    "max_grad_norm": [0.1],
    "lr_scheduler_type": ["linear", "constant_with_warmup"],
    "warmup_steps": [1],
    "num_iterations": [2],
    "temperature": [0.5],
    "top_p": [0.5],
    "top_k": [2],
    "loss_type": [name for name in LOSS_TYPES if name != "grpo" and name not in CAP],
    "importance_sampling_level": ["sequence"],
    "epsilon": [0.01],
    "epsilon_high": [0.01],
    "beta": [0.5],
    "use_bias_correction_kl": [True],
    "entropy_coef": [0.5],
    "scale_rewards": ["mean", "batch"],
    "advantage_estimator": ["rloo", "none"],
    "reward_weights": [(0.2, 1.0)],
    "mask_truncated_completions": [True],
    "shuffle_dataset": [False],
    "seed": [1],
    "optim": ["adafactor"],
    "rollout_quantization": ["int4-group"],
    "rollout_lag": [1],
    "importance_sampling_correction": [False],
    "importance_sampling_clip_max": [0.5],
}
# These change memory, time or what stops a run, and the numbers by rounding at most.
WITHOUT_NUMBERS = {*("gradient_accumulation_steps", "gradient_checkpointing", "memory_budget_gib"), "abort_grad_norm"}
# Next to these settings the options that need others are tried: one loss per formula, and what switches something on.
FORMULAS = {loss.token: name for name, loss in reversed(TABLE.items())}.values()
LOSSES = {name: {"loss_type": name, **CAP.get(name, {})} for name in FORMULAS}
CONTEXTS = {
    **LOSSES,
    **{f"{name}, 2 iterations": {**settings, "num_iterations": 2} for name, settings in LOSSES.items()},
    "beta": {"beta": 0.5},
    "beta, corrected": {"beta": 0.5, "use_bias_correction_kl": True},
    "rloo": {"advantage_estimator": "rloo"},
    "quantized": {"rollout_quantization": "int4-group"},
    "quantized, not corrected": {"rollout_quantization": "int4-group", "importance_sampling_correction": False},
    "lag": {"rollout_lag": 1, "importance_sampling_clip_max": 1.01},
    "lag, not corrected": {"rollout_lag": 1, "importance_sampling_correction": False},
}
REWARDS = ("accuracy", "length")
NEEDY = sorted({name for need in RUN_NEEDS for name in need.options.split()} & TELLING.keys())


@cache
def trained(**settings) -> tuple[list, list]:
    """Weights and metrics of a small run with these settings."""
    config = GRPOConfig(**{**SMALL, **settings})
    model = make_model(num_hidden_layers=1)
    history = list(train(model, word_tokenizer(), PROBLEMS, [late_letters, first_letter], config))
    return list(weights(model).values()), timeless(history)


def first_letter(completions, **columns) -> list[float]:
    """A second reward, so that their weights matter."""
    return [float(text.startswith("a")) for text in completions]


def differs(one, other) -> bool:
    """Whether two runs differ by more than rounding."""
    (weights_here, metrics_here), (weights_there, metrics_there) = one, other
    close = all(torch.allclose(here, there, atol=1e-6) for here, there in zip(weights_here, weights_there, strict=True))
    names = [metrics.keys() for metrics in metrics_here] == [metrics.keys() for metrics in metrics_there]
    return not (
        close and names and [pytest.approx(metrics, abs=1e-6, nan_ok=True) for metrics in metrics_here] == metrics_there
    )


def refused(given, context) -> bool:
    """Whether the table refuses this option next to these settings."""
    settings = RunConfig(config=GRPOConfig(**{**SMALL, **context, **given}), reward_funcs=REWARDS).to_settings()
    try:
        reject_ineffective_options(given, settings)
    except ValueError as error:
        assert f"`{next(iter(given))}` is" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", sorted(set(CONFIG_FIELDS) - WITHOUT_NUMBERS))
def test_an_option_changes_the_numbers_exactly_where_the_table_lets_it_pass(name):
    for what, context in CONTEXTS.items() if name in NEEDY else [("grpo", {})]:
        for value in TELLING[name]:
            given = {name: value}
            try:
                here, there = trained(**{**context, **given}), trained(**context)
            except ValueError:  # GRPOConfig refuses the two together
                continue
            if context.get(name) != value and value is not False:  # False asks for what holds anyway
                assert differs(here, there) != refused(given, context), (value, what)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --epsilon 0.3", "--epsilon .*--num-iterations.*--loss-type"),
        ("train --epsilon-high 0.3 --loss-type reinforce --num-iterations 2", "--epsilon-high .*--loss-type"),
        ("train --advantage-estimator rloo --scale-rewards batch", "--scale-rewards .*--advantage-estimator"),
        ("train --lora-targets q_proj", "--lora-targets .*--lora-rank"),
        ("train --backend trl --abort-grad-norm 3", "--abort-grad-norm .*--backend"),
        ("evaluate --temperature 0 --seed 3", "--seed .*--temperature"),
        ("curriculum --strength 50", "--strength .*--protect"),
        ("curriculum --protect l2 --strength 1 --fisher true", "--fisher .*ewc.*--protect"),
        ("curriculum --protect replay --strength 0.2 --online", "--online .*--protect"),
        ("curriculum --protect none --strength 2", "--strength .*--protect"),
        ("curriculum --overwrite", "--overwrite .*--output"),
        ("curriculum --data-path .", "--data-path .*--profile.*gsm8k"),
        ("sweep --overwrite", "--overwrite .*--output"),
        ("sweep --profile rloo.json --scale-rewards group,batch", "--scale-rewards .*--advantage-estimator"),
        ("cluster --profile quick --gpus-per-node 0 --deepspeed", "--deepspeed .*--gpus-per-node"),
        ("cluster --profile quick -- --greedy", "greedy.* train"),
        ("cluster --profile quick -- --abort-grad-norm 3", "abort_grad_norm.*backend"),
        ("bench --report --json", "--report .*--json"),
        ("challenge run . --output there", "--output .*judge"),
        ("challenge run . --to there", "--to .*submit"),
        ("challenge judge . --output there --name ana", "--name .*submit"),
    ],
)
def test_an_option_without_effect_is_refused_by_its_name(command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rloo.json").write_text('{"advantage_estimator": "rloo"}')
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == "" and re.search(words, line) and "no effect" in line
    assert [path.name for path in tmp_path.iterdir()] == ["rloo.json"]


@pytest.mark.parametrize(
    ("protection", "stage", "words"),
    [
        ({"strength": 50}, {}, "strength.*method"),
        ({"method": "ewc"}, {}, "method.*strength"),
        ({"method": "l2", "strength": 1, "num_examples": 3}, {}, "num_examples.*ewc"),
        ({"method": "ewc", "strength": 1, "decay": 0.5}, {}, "decay.*online"),
        ({"method": "ewc", "strength": 1, "online": True}, {}, "online.*three stages"),
        ({}, {"rewards": ["length"]}, "rewards.*grpo"),
        ({}, {"method": "grpo", "config": {"epsilon": 0.3}}, "epsilon.*num_iterations"),
    ],
)
def test_a_curriculum_from_a_file_is_held_to_the_same_rule(tmp_path, protection, stage, words):
    stages = [{"name": "a", "data": "basic"}, {"name": "b", "data": "sorting", **stage}]
    (tmp_path / "mine.json").write_text(json.dumps({"stages": stages, "protection": protection}))
    with pytest.raises(ValueError, match=rf"mine\.json: .*`{words}"):
        load_curriculum(tmp_path / "mine.json")
