"""Warnings about runs that learned nothing or became worse: each symptom by hand, and on real runs."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from small_policy import brevity

from grpo_edu.checks.inputs import stored_curves
from grpo_edu.cli.main import main
from grpo_edu.cli.train import training_text
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import Evaluation
from grpo_edu.runs.measures import RunFacts
from grpo_edu.runs.run import run_training
from grpo_edu.runs.summary import summary
from grpo_edu.runs.symptoms import find_symptoms

CONFIG = GRPOConfig(learning_rate=3e-4)
HEALTHY = {
    "reward": 0.5,
    "grad_norm": 0.7,
    "frac_reward_zero_std": 0.1,
    "entropy": 0.3,
    "completions/clipped_ratio": 0.0,
}
TIED = HEALTHY | {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
UNPAID = TIED | {"reward": 0.0}

pytestmark = pytest.mark.usefixtures("no_pictures")


def steps(first, last=None):
    """A run of ten steps: five like the first, then five like the last."""
    return [first] * 5 + [first if last is None else last] * 5


def evaluation(correct, answers, n=100):
    """Of n problems, the first `correct` are solved, and the first `answers` completions have an answer."""
    texts = [str(row) for row in range(n)]
    found = ["7" if row < answers else None for row in range(n)]
    return Evaluation(texts, ["basic"] * n, texts, found, [row < correct for row in range(n)])


GOOD = evaluation(50, 100)


@pytest.mark.parametrize(
    ("history", "config", "before", "after", "words"),
    [
        (steps(UNPAID), CONFIG, GOOD, GOOD, "reward is 0.*no step had a gradient.*solved 50%.*cannot read.*Call it"),
        (steps(UNPAID), CONFIG, evaluation(0, 90), None, "no step had a gradient.*cannot read.*solves almost none"),
        (
            steps(UNPAID | {"completions/clipped_ratio": 1.0}),
            CONFIG,
            GOOD,
            GOOD,
            "100% .* cut off.*completion_length.*now 96",
        ),
        (
            steps(TIED),
            replace(CONFIG, num_generations=2),
            GOOD,
            GOOD,
            "too few completions.*8 or more.*`num_generations` .now 2",
        ),
        (steps(TIED | {"reward": 1.0}), CONFIG, evaluation(95, 100), None, "no step.*solved 95%.*harder `data`"),
        (steps(TIED | {"reward": 1.0}), CONFIG, GOOD, GOOD, "no step.*every completion has.*wrong completions"),
        (
            steps(HEALTHY | {"frac_reward_zero_std": 0.6}),
            CONFIG,
            GOOD,
            GOOD,
            "60% of the groups tie.*alike.*`temperature`",
        ),
        (steps(HEALTHY, UNPAID), CONFIG, GOOD, GOOD, "`reward` falls from 0.5 .* to 0 .*`learning_rate` .now 0.0003"),
        (
            steps(HEALTHY, HEALTHY | {"entropy": 6.5}),
            CONFIG,
            GOOD,
            GOOD,
            "becomes random.*entropy .* 0.3 to 6.5.*learning_rate",
        ),
        (
            steps(HEALTHY, TIED | {"entropy": 0.001}),
            CONFIG,
            GOOD,
            GOOD,
            "entropy .* 0.3 to 0.001.*deterministic.*`temperature`",
        ),
        (steps(HEALTHY), CONFIG, GOOD, evaluation(20, 100), "accuracy fell.*50% to 20%.*p = .*`learning_rate`"),
        (
            steps(HEALTHY, HEALTHY | {"reward": 0.9}),
            CONFIG,
            GOOD,
            evaluation(20, 100),
            "accuracy fell.*0.5 to 0.9.*pays for something other.*held-out",
        ),
        (steps(HEALTHY), CONFIG, evaluation(0, 0), evaluation(0, 0), "only 0 of 100.*`prompt_template`.*#### answer"),
        (steps(HEALTHY), CONFIG, GOOD, evaluation(50, 2), "only 2 of 100.*from 100.*lost the answer format"),
    ],
)
def test_a_symptom_is_named_with_cause_and_remedy(history, config, before, after, words):
    (text,) = find_symptoms(history, RunFacts(config, before, after))
    assert re.search(words, text)


def test_a_run_too_short_for_two_means_shows_one():
    often_cut = [HEALTHY | {"reward": reward, "completions/clipped_ratio": 0.5} for reward in (0.2, 0.4, 0.6)]
    (text,) = find_symptoms(often_cut, RunFacts(CONFIG, GOOD, GOOD))
    assert "cut off: 50% (" in text and "`reward` is 0.4 on average" in text and " goes from " not in text


def test_ties_are_no_symptom_where_the_advantage_is_the_reward():
    rewarded = steps(TIED | {"reward": 1.0, "grad_norm": 0.4})
    assert find_symptoms(rewarded, RunFacts(CONFIG, GOOD, GOOD))
    assert not find_symptoms(rewarded, RunFacts(replace(CONFIG, advantage_estimator="none"), GOOD, GOOD))


def test_all_completions_truncated_and_left_out():
    history = steps(HEALTHY | {"grad_norm": 0.0, "completions/clipped_ratio": 1.0})
    (text,) = find_symptoms(history, RunFacts(replace(CONFIG, mask_truncated_completions=True), GOOD, GOOD))
    assert re.search("no step had a gradient.*mask_truncated_completions.*`max_completion_length`", text)


@pytest.mark.parametrize(
    ("history", "before", "after"),
    [
        (steps(HEALTHY, HEALTHY | {"reward": 0.9}), GOOD, evaluation(80, 100)),
        (steps(HEALTHY), GOOD, evaluation(48, 100)),  # within chance
        (steps(HEALTHY, TIED | {"reward": 1.0, "entropy": 0.001}), GOOD, evaluation(99, 100)),  # solved
        (steps(UNPAID | {"grad_norm": 0.1}, HEALTHY), evaluation(1, 90), evaluation(50, 100)),  # a slow start
        ([HEALTHY], GOOD, None),
        ([], GOOD, None),
    ],
)
def test_a_run_that_learns_or_only_varies_gets_no_warning(history, before, after):
    assert find_symptoms(history, RunFacts(CONFIG, before, after)) == []


def test_the_stored_runs_of_the_diagnosis_lab_are_told_apart():
    """The curves have no gradient norms; a tied batch has none."""
    visible = ("reward always 0", "chat template skipped", "length truncation", "tied rewards", "lr too high")
    for arm in (*visible, "KL wrong sign", "healthy", "groups mixed", "EOS masked"):
        for curves in stored_curves(arm):
            pairs = zip(curves["reward"], curves["frac_reward_zero_std"], strict=True)
            history = [{"reward": r, "frac_reward_zero_std": tied, "grad_norm": float(tied < 1)} for r, tied in pairs]
            assert bool(find_symptoms(history, RunFacts(CONFIG))) == (arm in (*visible, "KL wrong sign")), arm


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"learning_rate": 1e-30}, "`learning_rate` (now 1e-30)"),
        ({"max_grad_norm": 1e-300}, "`max_grad_norm` = 1e-300"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 10**9}, "`warmup_steps` is 1000000000"),
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_settings_that_cannot_learn_are_named_after_the_run(policy_dir, tmp_path, settings, cause, rank):
    config = GRPOConfig(num_generations=4, prompts_per_step=2, max_completion_length=16, max_steps=2, **settings)
    result = run_training(
        policy_dir, rewards=brevity, output=tmp_path / "run", config=config, n=3, greedy=False, progress=False,
        lora_rank=rank,
    )  # fmt: skip
    assert any(step["grad_norm"] > 0 for step in result.history)
    (warning,) = [text for text in result.warnings if text.startswith("Nothing was learned")]
    assert cause in warning and warning in (tmp_path / "run" / "summary.md").read_text()


def test_a_warm_up_that_is_longer_than_the_run_is_said_even_if_the_weights_moved():
    config = GRPOConfig(lr_scheduler_type="linear", warmup_steps=10, max_steps=5)
    step = {"reward": 0.5, "grad_norm": 1.0, "frac_reward_zero_std": 0.0, "entropy": 1.0}
    (warning,) = find_symptoms([step] * 5, RunFacts(config))
    assert "`warmup_steps` is 10 and the run has 5 steps" in warning
    assert not find_symptoms([step] * 5, RunFacts(replace(config, max_steps=11)))


@pytest.mark.slow
def test_a_run_that_learned_nothing_says_so_everywhere(policy_dir, tmp_path):
    def nothing(completions, **columns):
        return [0.0] * len(completions)

    config = GRPOConfig(num_generations=4, prompts_per_step=2, max_completion_length=24, max_steps=2)
    options = dict(config=config, n=6, greedy=False, progress=False)
    result = run_training(policy_dir, rewards=nothing, output=tmp_path / "run", **options)
    (warning,) = [text for text in result.warnings if "no step had a gradient" in text]
    assert f"- {warning}" in (tmp_path / "run" / "summary.md").read_text()
    assert warning in json.loads((tmp_path / "run" / "result.json").read_text())["warnings"]
    assert "`frac_reward_zero_std`" in training_text(result)  # a metric is not an option
    assert "Warning: The reward is 0" in training_text(result) and "--max-completion-length" in training_text(result)
    paid = run_training(policy_dir, rewards=brevity, output=tmp_path / "paid", **options)
    assert not any("gradient" in text or "Nothing" in text for text in paid.warnings)
    readable = replace(paid, before=GOOD, after=GOOD)
    assert "## Warnings" not in summary(readable) and "Warning" not in training_text(readable)


def test_cut_off_completions_and_a_constant_reward_are_named():
    step = {"reward": 0.5, "grad_norm": 1.0, "frac_reward_zero_std": 0.0, "entropy": 0.2}
    cut = {**step, "completions/clipped_ratio": 0.125}
    (text,) = find_symptoms([cut] * 8, RunFacts(GRPOConfig(max_completion_length=50)))
    assert "`max_completion_length` (now 50)" in text and "12%" in text
    assert not find_symptoms([{**cut, "completions/clipped_ratio": 0.1}] * 8, RunFacts(GRPOConfig()))
    paid = {"rewards/a/mean": 0.5, "rewards/a/std": 0.2, "rewards/b/mean": 1.0, "rewards/b/std": 0.0}
    (text,) = find_symptoms([{**step, **paid}] * 3, RunFacts(GRPOConfig()))
    assert "`b` pays 1" in text and "same" in text
    assert not find_symptoms([{**step, **paid, "rewards/b/mean": mean} for mean in (0.0, 1.0)], RunFacts(GRPOConfig()))


@pytest.mark.slow
def test_the_token_that_ends_a_turn_is_named_if_no_completion_ends_with_it(policy_dir, tmp_path, capsys):
    shutil.copytree(policy_dir, tmp_path / "model")
    for name, key, value in (
        ("tokenizer_config", "eos_token", "<|endoftext|>"),
        ("config", "eos_token_id", 256),
        ("generation_config", "eos_token_id", 256),
    ):
        file = tmp_path / "model" / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    config = GRPOConfig(num_generations=4, prompts_per_step=2, max_completion_length=6, max_steps=2)
    options = dict(config=config, n=3, greedy=False, progress=False)
    result = run_training(tmp_path / "model", rewards=brevity, output=tmp_path / "run", **options)
    look = (tmp_path / "run" / "first_look.txt").read_text()
    assert "Warning: the chat template ends a turn with '<|im_end|>', which does not end a completion" in look
    named = [text for text in result.warnings if "ends a turn with '<|im_end|>'" in text]
    assert named and not any("Raise `max_completion_length`" in text for text in result.warnings)
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "ends a turn with '<|im_end|>'" in printed and "Raise `max_completion_length`" not in printed
    result = run_training(policy_dir, rewards=brevity, output=tmp_path / "right", **options)
    assert "Warning" not in (tmp_path / "right" / "first_look.txt").read_text()
    assert not any("ends a turn" in text for text in result.warnings)
