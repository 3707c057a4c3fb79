"""The stored studies that the course quotes: what made them, that their numbers agree, and that their statements hold.

A study takes minutes to hours, so the tests do not repeat it. They hold its record against its script.
"""

import ast
import copy
import importlib
import json
import os
import re
import sys
from argparse import Namespace
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from close import assert_close
from pytest import approx
from scipy.stats import binom

from benchmarks import __main__ as runner
from benchmarks import (
    advantages,
    blind_reading,
    choices,
    contamination,
    curriculum,
    default_run,
    entropy_collapse,
    finetuning_comparison,
    forgetting,
    gsm8k,
    lost_rows,
    mutation,
    notebooks,
    objectives,
    other_policy,
    parity,
    razor,
    real_model,
    real_model_baselines,
    reward_hacking,
    skill,
    spurious,
    step,
    studies,
    word_game,
)
from benchmarks.harness import RESULTS, Ledger, estimate, run_study, shuffled
from grpo_edu import load_policy
from grpo_edu.config import SupervisedConfig
from grpo_edu.evaluation import mcnemar, wilson_interval
from grpo_edu.turns import environment_reward

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHMARKS = REPOSITORY / "benchmarks"
STORED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
NO_SCRIPT = {"gsm8k_evaluation", "challenge"}  # the command line makes these
NO_MACHINE = {"extraction"}  # it counts, and counts alike everywhere


def objects(record):
    """Every dict in a record, at any depth."""
    if isinstance(record, dict):
        yield record
    if isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from objects(part)


def assert_follows(found, stored):
    """Fail if a summary of the runs differs from what its record has under these names."""
    assert_close(found, {name: stored[name] for name in found})


@pytest.mark.parametrize("name", STORED)
def test_a_record_says_what_made_it_and_names_no_folder(name):
    record = STORED[name]
    assert name in NO_MACHINE or record["machine"]["torch"]
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\)", json.dumps(record))
    if name not in NO_SCRIPT:
        _, _, script = record["command"].partition("python -m ")
        module = importlib.import_module(script.split()[0])
        assert getattr(module, "COMMAND", script) in record["command"]


@pytest.mark.parametrize("name", STORED)
def test_counts_shares_and_intervals_agree(name):
    for row in objects(STORED[name]):
        if {"k", "n", "accuracy"} <= row.keys():
            assert row["accuracy"] == approx(row["k"] / row["n"], abs=1e-12)
        if {"k", "n", "low", "high"} <= row.keys():
            assert (row["low"], row["high"]) == approx(wilson_interval(row["k"], row["n"]), abs=1e-12)
        if {"difference", "low", "high"} <= row.keys():
            assert row["low"] <= row["difference"] <= row["high"]


VERDICTS = {
    "advantages": lambda record: advantages.verdicts(record["before"], record["runs"]),
    "contamination": lambda record: contamination.verdicts(record["runs"]),
    "curriculum": curriculum.verdicts,
    "default_run": lambda record: default_run.verdicts(record["runs"]),
    "finetuning_comparison": lambda r: finetuning_comparison.verdicts(r["before"], r["tuning"], r["runs"]),
    "objectives": lambda record: objectives.verdicts(record["before"], record["runs"]),
    "reward_hacking": lambda record: reward_hacking.verdicts(record["runs"]),
    "skill": skill.verdicts,
    "step_tiny": lambda record: step.verdicts(record, "tiny"),
    "step_494M": lambda record: step.verdicts(record, "494M"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_every_statement_holds_and_follows_from_the_stored_numbers(name):
    stored = STORED[name]["verdicts"]
    assert stored == VERDICTS[name](copy.deepcopy(STORED[name])) and all(stored.values())


def lower(rows, **changes):
    """Spoil the first of these rows."""
    rows[0] |= changes


# study → a change of its stored record that must break a statement
SPOILED = {
    "advantages": lambda record: lower(record["runs"], after={"k": record["before"]["k"]}),
    "contamination": lambda record: lower(record["runs"], leaked={"before": 25, "after": 47}),
    "curriculum": lambda record: lower(record["fisher"], rank={"sampled": 0.1, "lightning": 0.2}),
    "default_run": lambda record: lower(record["runs"], p_value=0.001),
    "finetuning_comparison": lambda record: lower(record["runs"], k=0, solved="0" * 300),
    "objectives": lambda record: lower(record["runs"], after={"k": record["before"]["k"]}),
    "reward_hacking": lambda record: lower(record["runs"], p_value=0.001),
    "skill": lambda record: lower(record["grpo"]["per_seed"], difference=0.1),
}


@pytest.mark.parametrize("name", SPOILED)
def test_one_run_that_misses_a_bound_breaks_a_statement(name):
    record = copy.deepcopy(STORED[name])
    SPOILED[name](record)
    assert not all(VERDICTS[name](record).values())


def test_the_page_of_measurements_shows_the_default_run_and_its_p_values_are_possible():
    """With `gain` more problems won than lost, p is smallest when none was lost, and largest when most were."""
    runs = STORED["default_run"]["runs"]
    page = (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    assert all(line in page for line in default_run.table(runs).splitlines())
    gain = STORED["default_run"]["gain over seeds and problems"]
    assert_close(default_run.gain(runs), gain)
    interval = f"{100 * gain['low']:.1f} to {100 * gain['high']:.1f}"
    assert interval in page and interval in (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for run in runs:
        before, after = run["accuracy_before"], run["accuracy_after"]
        assert before["n"] == after["n"] >= 300 and set(run) == set(default_run.kept(run))
        for accuracy, name in zip((before, after), default_run.SOLVED, strict=True):
            assert (run[name].count("1"), len(run[name])) == (accuracy["k"], accuracy["n"])
        p_value = mcnemar(*([bit == "1" for bit in run[name]] for name in default_run.SOLVED)).p_value
        assert_close(p_value, run["p_value"], atol=0)  # they are as small as 1e-39
        gain = after["k"] - before["k"]
        most_lost = min(before["k"], after["n"] - after["k"])
        largest = 2 * binom.cdf(most_lost, 2 * most_lost + gain, 0.5)
        assert 2.0 ** (1 - gain) * (1 - 1e-9) <= run["p_value"] <= largest * (1 + 1e-9), run["seed"]


# study → its summary of its stored runs, under the names of its record
RECOMPUTED = {
    "spurious": lambda: {"models": spurious.summary(ledger_of(spurious)), "coins": spurious.coins(ledger_of(spurious))},
    "entropy_collapse": lambda: entropy_collapse.summary(ledger_of(entropy_collapse)),
    "gsm8k": lambda: gsm8k.summary(ledger_of(gsm8k)),
    "razor": lambda: razor.summary(ledger_of(razor)),
    "other_policy": lambda: other_policy.summary(ledger_of(other_policy)),
    "real_model_baselines": lambda: real_model_baselines.summary(
        ledger_of(real_model_baselines), real_model.open_ledger()
    ),
    "blind_reading": lambda: blind_reading.summary(Ledger(blind_reading.CHOICES).rows),
    "real_model": lambda: {
        "arithmetic, new seeds": real_model.summary_of(real_model.open_ledger(), "arithmetic", real_model.NEW_SEEDS)
    },
}


def ledger_of(study):
    return Ledger(study.LEDGER)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_summary_of_a_study_follows_from_its_runs(name):
    assert_follows(RECOMPUTED[name](), STORED[name])


PAGES = [REPOSITORY / "README.md", REPOSITORY / "docs" / "studies.md", *sorted((BENCHMARKS / "studies").glob("*.md"))]
NUMBER = r"([+-]?\d+\.\d+)"
INTERVAL = re.compile(rf"{NUMBER}(?: points)?(?: \(|, ){NUMBER} to {NUMBER}")
BOUNDS = re.compile(r"([+-]?\d+\.\d) to ([+-]?\d+\.\d)(?!\d)")  # in points


@cache
def stored_intervals():
    """Mean, low and high of every interval: in points and as it is, also of the opposite difference."""
    runs = STORED["default_run"]["runs"]
    gains = [run["accuracy_after"]["accuracy"] - run["accuracy_before"]["accuracy"] for run in runs]
    found = []
    for row in [*objects(list(STORED.values())), estimate(gains)]:
        mean = row.get("difference", row.get("value"))
        if isinstance(mean, float) and {"low", "high"} <= row.keys():
            interval = np.array([mean, row["low"], row["high"]])
            found += [interval, -interval[[0, 2, 1]], 100 * interval, -100 * interval[[0, 2, 1]]]
    return np.array(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_interval_of_a_study_that_a_page_prints_is_stored(page):
    """To half of the last digit that is printed."""
    text = page.read_text(encoding="utf-8").replace("−", "-")
    printed = INTERVAL.findall(text)
    assert len(printed) > 3
    for numbers in printed:
        half = 0.501 * 10.0 ** -len(numbers[0].partition(".")[2])
        distances = np.abs(stored_intervals() - np.array(numbers, dtype=float)).max(axis=1)
        assert distances.min() <= half, " ".join(numbers)
    if page.parent != BENCHMARKS / "studies":  # here all bounds are those of intervals, also without their mean
        for numbers in BOUNDS.findall(text):
            distances = np.abs(stored_intervals()[:, 1:] - np.array(numbers, dtype=float)).max(axis=1)
            assert distances.min() <= 0.0501, " ".join(numbers)


def test_each_study_answers_its_question_in_150_words_and_names_its_command_and_its_protocol():
    page = (REPOSITORY / "docs" / "studies.md").read_text(encoding="utf-8")
    protocols = {path.stem for path in (BENCHMARKS / "studies").glob("*.md")}
    sections = page.split("\n## ")[1:]
    for section in sections:
        assert len(section.split()) <= 150, section.splitlines()[0]
        assert "*Refuted by*" in section
    assert {name for section in sections for name in re.findall(r"benchmarks/studies/(\w+)\.md", section)} == protocols
    assert {name for section in sections for name in re.findall(r"python -m benchmarks\.(\w+)`", section)} >= protocols
    assert protocols | {"quantization_bits", "real_model_baselines"} == set(studies.STUDIES)
    assert all(importlib.import_module(f"benchmarks.{name}").COMMAND for name in studies.STUDIES)


@pytest.mark.slow
@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="there is no history")
def test_no_row_of_a_results_file_has_disappeared():
    """A run that was superseded is marked and stays; one that is deleted is found."""
    if lost_rows.git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the history is incomplete; git fetch --unshallow completes it")
    for path in RESULTS.glob("*.jsonl"):
        name = path.relative_to(REPOSITORY).as_posix()
        assert not list(lost_rows.lost_rows(name, Ledger(path).rows)), name
    kept = [row for row in Ledger(real_model.LEDGER).rows if "superseded" not in row]
    lost = [row for _, row in lost_rows.lost_rows("benchmarks/results/real_model.jsonl", kept)]
    assert [(row["phase"], row["seed"]) for row in lost] == [("report", 0), ("before", 0), ("before", 1), ("before", 2)]


def test_each_arm_of_the_entropy_study_changes_one_thing():
    def settings(arm, strength):
        return entropy_collapse.config_of(arm, strength, 2e-4, seed=3).to_dict().items()

    plain = settings("plain", 2e-4)
    changes = {
        arm: [{name for name, _ in settings(arm, strength) ^ plain} for strength in entropy_collapse.GRIDS[arm]]
        for arm in entropy_collapse.CHANGES
    }
    parts = entropy_collapse.PARTS_OF_LOWER_RATE
    assert {arm: {name for name, _ in settings(arm, parts[arm]) ^ plain} for arm in parts} == {
        "half rate": {"learning_rate"},
        "twice the steps": {"max_steps"},
    }
    assert changes == {
        "clip higher": [{"epsilon_high"}] * 2,
        "entropy bonus": [{"entropy_coef"}] * 2,
        "KL term": [{"beta"}] * 2,
        "lower rate": [{"learning_rate", "max_steps"}] * 2,
        "hotter sampling": [set()] * 2,
    }
    parts = [{problem.prompt for problem in entropy_collapse.problems(part)} for part in ("selection", "heldout")]
    assert [len(part) for part in parts] == [100, 300] and not parts[0] & parts[1]
    assert not set.union(*parts) & {problem.prompt for problem in entropy_collapse.problems("train")}


def test_the_entropy_study_chooses_the_first_of_the_best_and_holm_stops_at_the_first_miss(tmp_path):
    ledger = Ledger(tmp_path / "study.jsonl")
    for strength, counts in ((0.02, [32, 32]), (0.1, [32, 32])):
        assert entropy_collapse.chosen(ledger, "KL term") is None
        ledger.add(phase="select", arm="KL term", strength=strength, counts=counts)
    assert entropy_collapse.chosen(ledger, "KL term") == 0.02
    for strength, counts in ((2e-4, [16, 16]), (4e-4, [32, 1])):  # pass@1 50% and 52%, pass@32 100% both
        ledger.add(phase="select", arm="plain", strength=strength, counts=counts)
    assert entropy_collapse.chosen(ledger, "plain") == 4e-4
    p_values = {"a": (0.001, 0.02), "b": (0.04, 0.9)}  # of 4 tests: 0.05/4 = 0.0125, 0.05/3 = 0.0167
    comparisons = {
        arm: {"pass@1": {"p_value": first}, "pass@32": {"p_value": second}} for arm, (first, second) in p_values.items()
    }
    assert entropy_collapse.holm(comparisons) == ["a, pass@1"]


def test_the_entropy_study_counts_right_samples_and_a_hotter_model_is_less_certain():
    problem = entropy_collapse.problems("selection")[1]
    asked = [problem, replace(problem, answer="-1")]
    policy = load_policy(entropy_collapse.MODEL)
    cold, usual, hot = (entropy_collapse.outcome(*policy, asked, 0, temperature) for temperature in (0.1, 1.0, 1.6))
    assert 3 * cold["entropy"] < usual["entropy"] < hot["entropy"] / 1.5
    assert 0 < usual["counts"][0] <= 32 and usual["counts"][1] == 0


def test_the_readme_shows_the_first_answers_of_the_real_model_and_whether_they_are_right():
    ledger, page = real_model.open_ledger(), (REPOSITORY / "README.md").read_text(encoding="utf-8")
    before = ledger.find(phase="before", task="instructions", seed=None)
    after = ledger.find(phase="report", task="instructions", arm="strict", seed=0)
    for number, problem in enumerate(real_model.problems_of("instructions", "heldout")[:3]):
        asked = problem.prompt.removeprefix("Write one sentence about ")
        answers = [f"{'✗✓'[int(run['greedy'][number])]} {run['greedy/completions'][number]}" for run in (before, after)]
        assert f"| … {asked} | {answers[0]} | {answers[1]} |" in page


def made_up_seed(gap, shift):
    """A start and two points each of three methods; GRPO loses `gap` of ten problems more, at a KL moved by `shift`."""

    def point(method, kl, new, old):
        return {"method": method, "kl": kl, "new": "1" * new + "0" * (10 - new), "old": "1" * old + "0" * (10 - old)}

    start = {key: value for key, value in point("", 0.0, 2, 9).items() if key != "method"}
    points = [point("supervised", 2.0, 4, 7), point("supervised", 4.0, 8, 5)]
    points += [point("GRPO", 1.0 + shift, 3, 8 - gap), point("GRPO", 3.0 + shift, 6, 6 - gap)]
    return start, [*points, point("other form", 5.0, 1, 0)]


@pytest.mark.parametrize("gap", [0, 2])
def test_methods_are_compared_at_equal_distance_and_at_equal_accuracy_by_interpolation(gap):
    starts, by_seed = zip(*(made_up_seed(gap, 0.0) for _ in range(3)), strict=True)
    for equal in ("kl", "new"):
        found = razor.matched(starts, by_seed, "GRPO", equal)
        assert found["difference"] == approx(-gap / 10) and (found["compared"], found["of"]) == (6, 6)
    starts, by_seed = zip(*(made_up_seed(gap, 2.0) for _ in range(3)), strict=True)
    found = razor.matched(starts, by_seed, "GRPO", "kl")  # one of its two points is now beyond supervised training's
    assert (found["compared"], found["of"]) == (3, 6)
    assert found["difference"] == approx((8 - gap - 6) / 10), "at KL 3 supervised training solves 6 of ten"
    far = razor.matched(starts, by_seed, "other form", "kl")
    assert (far["compared"], far["of"]) == (0, 3) and "difference" not in far


def test_a_curve_is_tested_on_the_seed_that_it_has_not_seen():
    def points(slopes):
        kls = (1.0, 2.0, 3.0, 4.0)
        return [{"method": name, "kl": kl, "change": -slope * kl} for name, slope in slopes.items() for kl in kls]

    alike = [points({"supervised": 1, "GRPO": 1})] * 3
    assert razor.left_out(alike, "kl", razor.falling_curve) == approx([1, 1, 1])
    differ = [points({"supervised": 1, "GRPO": 3})] * 3
    together, apart = (razor.left_out(differ, "kl", razor.falling_curve, own=own) for own in (False, True))
    assert apart == approx([1, 1, 1]) and max(together) < 0.7
    odd = [*alike[:2], points({"supervised": -1, "GRPO": -1})]  # the third seed does the opposite, so it is missed
    assert razor.left_out(odd, "kl", razor.falling_curve)[2] < -1
    bent = [{"kl": kl, "change": kl - kl**2, "method": ""} for kl in (0.0, 1.0, 2.0, 5.0)]
    assert razor.left_out([bent, bent], "kl", razor.quadratic) == approx([1, 1])
    assert razor.mean_of_equals(["a", "a", "b"], [1.0, 2.0, 5.0], ["b", "a"]).tolist() == [5.0, 1.5]


@pytest.mark.long
def test_distillation_approaches_its_teacher_on_the_students_own_samples():
    model, tokenizer = load_policy("halfway")
    teacher, _ = load_policy("tiny")
    asked = razor.problems("new", "validation")[:16]
    batch = razor.padded(razor.sampled(model, tokenizer, asked, 1, torch.Generator().manual_seed(0)), tokenizer)
    per_completion, per_token = razor.divergence(model, teacher, batch)
    assert razor.divergence(model, model, batch) == (0.0, 0.0)
    assert per_completion == approx(per_token * int(batch[1].sum()) / 16, rel=1e-5)
    config = SupervisedConfig(max_steps=3, prompts_per_step=16, learning_rate=1e-3)
    losses = [row["loss"] for row in razor.distill(model, tokenizer, teacher, asked, config)]
    assert losses[0] == approx(per_token, rel=0.2), "the first batch is other samples of the same puzzles"
    assert razor.divergence(model, teacher, batch)[1] < 0.7 * per_token
    texts = {problem.prompt for part in ("train", "validation") for problem in razor.problems("new", part)}
    assert not texts & {problem.prompt for problem in razor.problems("new", "heldout")}
    sizes = [len(razor.problems(task, "heldout")) for task in ("old", "new")]
    assert sizes == [300, 300]


@pytest.mark.long
def test_the_study_of_the_word_game_follows_from_its_runs():
    found = word_game.summary(Ledger(word_game.LEDGER))
    assert_follows(found, STORED["word_game"])
    assert STORED["word_game"]["verdicts"] == word_game.verdicts(found)
    assert all(len(found["sampled"][arm]["each"]) == 5 for arm in word_game.ARMS)


def test_an_interval_over_words_draws_the_ten_games_of_a_word_together():
    games = word_game.games_of("heldout")
    won = {"CAT", "DOG"}
    bits = "".join(str(int(game.answer in won)) for game in games)
    found = word_game.by_word(bits)
    assert len(found) == 30 and sorted(found)[-3:] == [0.0, 1.0, 1.0]
    lost = "0" * len(games)
    both = word_game.compare([lost] * 3, [bits] * 3)
    assert both["over seeds and words"]["difference"] == approx(both["over seeds and games"]["difference"])
    assert both["over seeds and words"]["high"] > both["over seeds and games"]["high"], "alike games say less"
    parts = [word_game.games_of(split) for split in ("train", "selection", "heldout")]
    assert sum(map(len, parts)) == len({(game.prompt, game.answer) for part in parts for game in part}) == 870


def test_shuffled_rewards_are_the_rewards_in_another_order():
    class Paid:
        def __init__(self, reward):
            self.get_reward = lambda: float(reward)

    environments = [Paid(reward) for reward in range(20)]
    paid = shuffled(environment_reward, seed=0)
    first, second = (paid([""] * 20, environments=environments) for _ in range(2))
    assert (
        sorted(first) == sorted(second) == list(range(20))
        and len({*map(tuple, (first, second)), tuple(range(20))}) == 3
    )


def test_the_page_says_how_fast_a_step_is_and_how_far_trl_is():
    """The ratios with their ranges, the seconds next to busy neighbors, and the largest difference from TRL."""
    page = (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    ratios = [STORED["startup"]["sides"]["grpo_edu"]["times as fast as stock TRL"]]
    for scale in ("tiny", "smollm2"):
        ratios.append(STORED[f"step_{scale}"]["step"]["grpo_edu"]["times as fast as stock TRL"])
    ratios.append(STORED["step_tiny"]["rollout"]["grpo_edu"]["times as fast as transformers"])
    for ratio in ratios:
        assert f"| {ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f}" in page
    for name, steps in STORED["shared"]["steps"].items():
        seconds = " | ".join(f"{spread['median']:.2f}" for spread in steps.values())
        assert f" | {seconds} |" in page, name
    rows = STORED["parity"]["rows"]
    largest = max(row[name] for row in rows for name in ("advantages", "loss", "gradient"))
    assert f"{largest:.1e}".replace("e-0", "e-") in page and f"{STORED['parity']['settings']:,} random" in page
    assert {row["loss type"] for row in rows} == set(parity.COMPARED)


def test_the_page_and_the_notebooks_say_what_the_notebooks_took():
    stored = STORED["notebooks"]
    assert all(stored["verdicts"].values())
    assert notebooks.table(stored["notebooks"]) in (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    paths = {path.stem: path for path in (REPOSITORY / "notebooks").glob("*.ipynb")}
    assert set(paths) == set(stored["notebooks"])
    for name, took in stored["notebooks"].items():
        opening = "".join(json.loads(paths[name].read_text(encoding="utf-8"))["cells"][0]["source"])
        for seconds, memory in re.findall(r"compute ≈ (\d+) s · memory ≈ ([\d.]+) GB", opening):
            assert 0.9 * took["seconds"] <= float(seconds) <= 1.5 * took["seconds"] + 5, name
            assert abs(float(memory) - took["peak"] / 1e9) < 0.15, name


# ---- the harness ----


def test_a_study_keeps_each_run_and_goes_on_where_it_was_left(tmp_path, capsys):
    made = []

    def run(name, seed):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((name, seed))
        return {"name": name, "seed": seed, "after": {"accuracy": 0.75}}

    def verdicts(before, runs):
        return {"all ran": len(runs) == 4, "it gains": runs[-1]["after"]["accuracy"] > before["accuracy"]}

    options = Namespace(seeds=[0, 1], output=tmp_path / "new" / "study.json", keep=False)
    parts = {"run": run, "verdicts": verdicts, "table": lambda before, runs: f"{len(runs)} rows"}
    with pytest.raises(KeyboardInterrupt):
        run_study(options, ["a", "b"], {"before": {"accuracy": 0.5}}, **parts)
    assert len(json.loads(options.output.read_text())["runs"]) == 3
    made.clear()
    options.keep = True
    assert run_study(options, ["a", "b"], {"before": {"accuracy": 0.5}}, **parts) == 0
    assert made == [("b", 1)]
    assert json.loads(options.output.read_text())["verdicts"] == {"all ran": True, "it gains": True}
    assert run_study(options, ["a", "b"], {"before": {"accuracy": 0.8}}, **parts) == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
@pytest.mark.parametrize(
    "tried",
    [["return x <= bound and x > -9", "return x < bound and x > -10"], pytest.param(None, marks=pytest.mark.long)],
)
def test_a_fault_that_the_tests_find_is_told_from_one_that_they_miss(tmp_path, tried):
    module = tmp_path / "mutated_module.py"
    module.write_text("def is_small(x, bound=1):\n    return x < bound and x > -9\n")
    test = tmp_path / "test_it.py"
    test.write_text("from mutated_module import is_small\n\ndef test():\n    assert is_small(0) and not is_small(1)\n")
    tree = ast.parse(module.read_text())
    mutants = [mutation.mutant(tree, number) for number in range(len(list(mutation.places(tree))))]
    found = {change["after"]: changed for changed, change in mutants}
    outcomes = {
        "def is_small(x, bound=2):": "killed",
        "return x < bound or x > -9": "killed",
        "return x <= bound and x > -9": "killed",
        "return x < bound and x >= -9": "survived",
        "return x < bound and x > +9": "killed",
        "return x < bound and x > -10": "survived",
    }
    assert found.keys() == outcomes.keys()
    for line in tried or outcomes:
        assert mutation.outcome(module, found[line], [str(module), str(test)], 60) == outcomes[line]


def test_the_contributors_page_sums_up_the_stored_mutants():
    page = " ".join((REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8").replace(",", "").split())
    record = STORED["mutation"]
    survivors = [row for part in record["modules"].values() for row in part["survivors"]]
    possible, mutants, killed = (
        sum(part[key] for part in record["modules"].values()) for key in ("possible", "mutants", "killed")
    )
    assert killed + len(survivors) == mutants and all(row["judged"] for row in survivors)
    assert all(text in page for text in (record["command"], f"{mutants} of {possible}", f"{killed} of the {mutants}"))


def test_one_command_lists_and_runs_every_benchmark(monkeypatch, capsys):
    assert runner.main([]) == 0
    listed = dict(re.findall(r"^(\w+)  +(\S.*)$", capsys.readouterr().out, re.MULTILINE))
    commands = {path.stem for path in Path(runner.__file__).parent.glob("*.py") if "\nCOMMAND = " in path.read_text()}
    assert commands <= set(listed) and all("``" not in about for about in listed.values())
    assert runner.main(["skil"]) == 2 and "do you mean skill?" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["benchmarks"])
    monkeypatch.setattr(skill, "main", lambda: 7 if sys.argv[1:] == ["--seeds", "3"] else 0)
    assert runner.main(["skill", "--seeds", "3"]) == 7


def test_the_interval_over_seeds_and_problems_of_the_skill_study_follows_from_its_runs():
    ledger, stored = Ledger(skill.LEDGER), STORED["skill"]
    before = ledger.find(phase="before")
    runs = sorted(ledger.select(phase="report", arm="grpo"), key=lambda row: row["seed"])
    for way, row in skill.gains_of(before, runs).items():
        assert row == approx(stored["grpo"]["over seeds and puzzles"][way], abs=0.001)
    for phase in ("pass 1024", "pass"):  # 1,024 and 64 samples
        known = [count > 0 for count in ledger.find(phase=phase, seed=None)["counts"]]
        found = skill.newly_solved(before, runs, known)
        if phase == "pass 1024":
            assert_follows(found, stored["pass"])
    shares = [known / new for known, new in zip(found["of these known"], found["newly solved"], strict=True)]
    assert 0.70 <= min(shares) and max(shares) <= 0.80  # as study and notebook 07 say


def test_two_halves_of_the_samples_are_two_draws_of_the_untrained_model():
    first, after, splits = [0, 1, 3, 4], [[4, 0, 2, 1]], list(combinations(range(4), 2))

    def solved(count, half):
        return any(sample < count for sample in half)

    pairs = [(half, tuple({*range(4)} - {*half})) for half in splits]
    again = sum(solved(c, one) and not solved(c, two) for c in first for one, two in pairs) / len(pairs)
    lost = [
        solved(old, one) and not solved(new, two)
        for old, new in zip(first, after[0], strict=True)
        for one in splits
        for two in splits
    ]
    found = skill.halves(first, after, 4)
    assert (found["samples"], found["second draw"]) == (2, approx(again))
    assert found["lost"] == [approx(sum(lost) / len(splits) ** 2)]
    assert found["gained"][0] - found["lost"][0] == approx(
        sum(skill.pass_at_k(4, c, 2) for c in after[0]) - sum(skill.pass_at_k(4, c, 2) for c in first)
    )


def test_a_factor_is_the_mean_over_the_levels_of_the_other():
    bits = {"a, x": "11110000", "a, y": "11111100", "b, x": "11000000", "b, y": "11100000"}
    rows = {arm: {0: {"bits": text}, 1: {"bits": text}} for arm, text in bits.items()}
    found = choices.factors(rows, [0, 1])
    assert {name: row["difference"] for name, row in found.items()} == {
        "a minus b": 5 / 16,
        "x minus y": -3 / 16,
        "a minus b, x": 2 / 8,
        "a minus b, y": 3 / 8,
        "interaction": -1 / 8,
    }


def test_the_units_of_the_forgetting_study_average_to_its_scores_and_holm_stops_at_the_first_miss():
    run = Ledger(forgetting.LEDGER).find(phase="report", method="replay", order="A first", seed=0)
    units = forgetting.per_unit(run)
    assert sum(units) / len(units) == approx(forgetting.scores(run)["average"], abs=1e-3)
    rows = {"A first": {"l2": {"p_value": 0.02}, "kl": {"p_value": 0.03}}, "B first": {"l2": {"p_value": 0.01}}}
    assert forgetting.holm(rows) == {"A first": ["l2", "kl"], "B first": ["l2"]}
    rows["B first"]["l2"]["p_value"] = 0.02
    assert forgetting.holm(rows) == {"A first": [], "B first": []}
