"""TRL's own trainer as a backend: on the same rollouts it walks the same path as this package's trainer."""

import itertools
import signal
import threading
import time
import warnings
from dataclasses import replace

import pytest
import torch
import trl
from random_policy import byte_tokenizer, random_model
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_edu.config import GRPOConfig
from grpo_edu.problems.templates import Problem, make_problems
from grpo_edu.rewards import accuracy_reward
from grpo_edu.scale.trl_backend import build_trainer, train_with_trl, trl_settings
from grpo_edu.trainer import train

PROBLEMS = make_problems("basic", 6, 0)
CONFIG = GRPOConfig(
    num_generations=4, prompts_per_step=2, max_completion_length=12, max_steps=3, learning_rate=1e-3, seed=5
)


def vowels(completions, **kwargs):
    """A reward that a random policy earns now and then."""
    return [float(sum(letter in "aeiouAEIOU" for letter in text)) for text in completions]


def policy(seed=0):
    tokenizer = byte_tokenizer()
    return random_model(tokenizer, max_position_embeddings=512, stop_ids=range(0, 256, 16), seed=seed), tokenizer


def walk(backend, config=CONFIG, problems=PROBLEMS, reward=vowels, **options):
    """History and weights of a run."""
    model, tokenizer = policy()
    history = list(backend(model, tokenizer, problems, reward, config, **options))
    return history, model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1, "epsilon_high": 0.28, "scale_rewards": "batch"},
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "dapo"},
        {
            "loss_type": "dr_grpo",
            "scale_rewards": "none",
            "lr_scheduler_type": "linear",
            "mask_truncated_completions": True,
            "top_k": 50,
        },
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1, "use_bias_correction_kl": True, "entropy_coef": 0.05},
    ],
    ids=["default", "beta", "iterations", "dr_grpo", "cispo"],
)
def test_both_trainers_walk_the_same_path(settings, monkeypatch):
    """Problems alike, so that their order is not a difference: same rollouts, rewards, gradients and weights.

    TRL shuffles the completions before it divides them into micro-batches; here it keeps groups together, as this
    package always does.
    """
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    config = replace(CONFIG, **settings)
    problems = [PROBLEMS[0]] * config.prompts_per_step
    ours, our_model = walk(train, config, problems)
    theirs, their_model = walk(train_with_trl, config, problems)
    assert [metrics.keys() for metrics in theirs] == [ours[0].keys()] * 3
    assert max(metrics["grad_norm"] for metrics in ours) > 0.01
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        same = [
            "reward",
            "reward_std",
            "rewards/vowels/mean",
            "completions/mean_length",
            "completions/clipped_ratio",
            "num_tokens",
            "step",
        ]
        if config.num_iterations == 1:  # else the one is a mean over updates, the other the last
            same += ["grad_norm", "learning_rate"]
        for name in same:
            assert other[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), (step, name)
        assert other["loss"] == pytest.approx(mine["loss"], abs=1e-5), step
        assert other.get("kl", 0) == pytest.approx(mine.get("kl", 0), abs=1e-4), step
    for name, weight in our_model.named_parameters():
        torch.testing.assert_close(their_model.get_parameter(name), weight, rtol=0, atol=2e-5, msg=name)
    start = policy()[0].get_parameter("lm_head.weight")
    assert (our_model.lm_head.weight - start).abs().max() > 1e-3


def test_both_trainers_have_the_same_gradient_with_one_ratio_per_completion():
    """The gradient itself, because AdamW turns rounding errors of entries that are nearly 0 into steps."""
    options = {"importance_sampling_level": "sequence", "entropy_coef": 0.05, "scale_rewards": "batch"}
    found = {}
    for backend in (train, train_with_trl):
        gradients = found.setdefault(backend, [])

        def keep(optimizer, *_, gradients=gradients):
            gradients.append([weight.grad.clone() for group in optimizer.param_groups for weight in group["params"]])

        hook = register_optimizer_step_pre_hook(keep)
        walk(backend, replace(CONFIG, max_steps=1, **options), [PROBLEMS[0]] * 2)
        hook.remove()
    ours, theirs = (
        sorted(gradients[0], key=lambda one: (one.shape, one.norm().item())) for gradients in found.values()
    )
    assert max(one.abs().max() for one in ours) > 0.01
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(other, mine, rtol=0, atol=1e-6)


def test_stock_trl_runs_on_the_same_settings(monkeypatch):
    history, model = walk(train_with_trl, rollout="transformers")
    assert len(history) == 3 and history[0].keys() == walk(train)[0][0].keys()
    assert not model.training and any(metrics["grad_norm"] > 0 for metrics in history)
    assert all(metrics["step_time"] > 0 for metrics in history)


def test_the_hook_replaces_transformers_generate(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("transformers' generate was called")

    monkeypatch.setattr("transformers.GenerationMixin.generate", refuse)
    config = replace(CONFIG, max_steps=1)
    assert len(walk(train_with_trl, config)[0]) == 1
    with pytest.raises(RuntimeError, match="generate was called"):
        walk(train_with_trl, config, rollout="transformers")


def test_answers_reach_the_rewards():
    """The columns of a problem arrive with its prompt; all-wrong answers of a random policy give 0."""
    seen = []

    def record(prompts, completions, answer, level, solution, **kwargs):
        seen.extend(zip(prompts, answer, level, solution, strict=True))
        return [0.0] * len(completions)

    problems = [Problem("One?", "1", "basic", "#### 1"), Problem("Two?", "2", "advanced", "#### 2")]
    walk(train_with_trl, replace(CONFIG, max_steps=1), problems, record)
    assert sorted(set(seen)) == [("One?", "1", "basic", "#### 1"), ("Two?", "2", "advanced", "#### 2")]
    assert len(seen) == 8
    history, _ = walk(train_with_trl, replace(CONFIG, max_steps=1), reward=accuracy_reward)
    assert history[0]["rewards/accuracy_reward/mean"] == history[0]["reward"] == 0


def test_problems_may_be_dictionaries():
    model, tokenizer = policy()
    rows = [{"prompt": "How long?", "answer": "12"}, {"prompt": "How wide?", "answer": "7", "unit": "cm"}] * 4
    trainer = build_trainer(model, tokenizer, rows, vowels, CONFIG)
    assert trainer.train_dataset["unit"][:2] == [None, "cm"]


def test_closing_early_leaves_the_last_full_step():
    model, tokenizer = policy()
    steps = train_with_trl(model, tokenizer, PROBLEMS, vowels, replace(CONFIG, max_steps=1_000))
    threads = threading.active_count()
    next(steps), next(steps)
    steps.close()
    assert threading.active_count() <= threads + 1 and not any("ThreadPool" in t.name for t in threading.enumerate())
    _, stopped = walk(train_with_trl, replace(CONFIG, max_steps=2))
    for kept, expected in zip(model.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(kept, expected)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to a thread")
def test_an_interrupt_inside_a_step_leaves_the_step_before():
    """Ctrl-C reaches the thread that waits, while TRL's scores a rollout: that step is never applied."""
    model, tokenizer = policy()
    calls = itertools.count(1)

    def reward(completions, **kwargs):
        if next(calls) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.5)
        return vowels(completions)

    steps = train_with_trl(model, tokenizer, PROBLEMS, reward, CONFIG)
    next(steps), next(steps)
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    _, stopped = walk(train_with_trl, replace(CONFIG, max_steps=2))
    for kept, expected in zip(model.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(kept, expected)


def test_an_error_inside_trl_comes_out():
    def broken(completions, **kwargs):
        raise ZeroDivisionError("reward of nothing")

    with pytest.raises(RuntimeError, match="'broken' raised ZeroDivisionError: reward of nothing"):
        walk(train_with_trl, reward=broken)


def test_nothing_is_printed_warned_or_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        walk(train_with_trl, replace(CONFIG, max_steps=1))
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"prompts_per_step": 7}, {}, "problems .*prompts_per_step = 7 .*6"),
        ({"advantage_estimator": "rloo"}, {}, "advantage_estimator: .*'rloo'"),
        ({"max_resamples": 2}, {}, "max_resamples: 2 .*TRL's GRPOTrainer does not have"),
        ({"scale_rewards": "mean"}, {}, "scale_rewards: .*'mean'"),
        ({"loss_type": "reinforce"}, {}, "loss_type: .*'reinforce'"),
        ({}, {"rollout": "llama"}, "rollout: 'llama' is unknown; choose one of grpo_edu, transformers"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(changes, options, message):
    with pytest.raises(ValueError, match=message):
        build_trainer(*policy(), PROBLEMS, vowels, replace(CONFIG, **changes), **options)


def test_trainer_is_trls_own_and_takes_more_of_its_settings(tmp_path):
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), **trl_settings(CONFIG) | {"gradient_checkpointing": True})
    trainer = build_trainer(*policy(), PROBLEMS, vowels, CONFIG, arguments=arguments)
    assert type(trainer) is trl.GRPOTrainer and trainer.args.gradient_checkpointing
    assert trainer.args.output_dir == str(tmp_path) and trainer.args.report_to == []
    settings = trl_settings(replace(CONFIG, beta=0.2))
    assert settings["loss_type"] == "grpo" and settings["temperature"] == 1.0
    chosen = {"use_bias_correction_kl": True, "epsilon_high": 0.28, "entropy_coef": 0.01}
    assert chosen.items() <= trl_settings(replace(CONFIG, **chosen)).items()
    assert build_trainer(*policy(), PROBLEMS, vowels, replace(CONFIG, beta=0.2)).beta == 0.2
