"""The stored studies that the course quotes: what made them, that their numbers agree, and that their statements hold.

A study takes minutes to hours, so the tests do not repeat it. They hold its record against its script, and run parts of
the scripts in a tiny setting.
"""

import copy
import importlib
import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from pytest import approx
from random_policy import byte_tokenizer, random_model
from scipy.stats import binom

from benchmarks import (
    advantages,
    broken_runs,
    choices,
    contamination,
    curriculum,
    default_run,
    finetuning_comparison,
    objectives,
    quantization_kernels,
    quantization_speed,
    quantization_study,
    quantized_rollouts,
    reward_hacking,
    skill,
    step,
    studies,
)
from benchmarks import forgetting as forgetting_study
from benchmarks.harness import RESULTS, Ledger, run_study
from grpo_edu import GRPOConfig
from grpo_edu.config import QUANTIZATION_SCHEMES
from grpo_edu.continual.forgetting import average_accuracy, forgetting
from grpo_edu.continual.stages import Protection
from grpo_edu.evaluation import Evaluation, wilson_interval
from grpo_edu.figures.diagnosis import SIGNS
from grpo_edu.problems.templates import Problem, problem_key
from grpo_edu.quantization.model import quantize_model
from grpo_edu.studies.broken_runs import CASES, HEALTHY

REPOSITORY = Path(__file__).resolve().parents[1]
STORED = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
NO_SCRIPT = {"mutation", "gsm8k", "challenge"}  # a study that is over, and two that the command line makes
NO_MACHINE = {"extraction"}  # it counts, and counts alike everywhere


def objects(record):
    """Every dict in a record, at any depth."""
    if isinstance(record, dict):
        yield record
    if isinstance(record, dict | list):
        for part in record.values() if isinstance(record, dict) else record:
            yield from objects(part)


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


SEEDS = range(5)
ARMS = {
    "advantages": ("name", list(advantages.WAYS)),
    "finetuning_comparison": ("name", list(finetuning_comparison.METHODS)),
    "objectives": ("name", [*objectives.LOSSES, objectives.WITH_KL]),
    "quantized_rollouts": ("condition", list(quantized_rollouts.CONDITIONS)),
    "reward_hacking": ("condition", list(reward_hacking.WEIGHTS)),
    "contamination": ("problems", [contamination.PROBLEMS]),
    "default_run": ("steps", [GRPOConfig().max_steps]),
}


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_ran_on_five_seeds(name):
    key, arms = ARMS[name]
    assert {(run[key], run["seed"]) for run in STORED[name]["runs"]} == {(arm, seed) for arm in arms for seed in SEEDS}
    assert len(STORED[name]["runs"]) == len(arms) * len(SEEDS)


def test_the_page_of_measurements_shows_the_default_run_and_its_p_values_are_possible():
    """With `gain` more problems won than lost, p is smallest when none was lost, and largest when most were."""
    runs = STORED["default_run"]["runs"]
    page = (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
    assert all(line in page for line in default_run.table(runs).splitlines())
    for run in runs:
        before, after = run["accuracy_before"], run["accuracy_after"]
        assert before["n"] == after["n"] >= 300 and set(run) == set(default_run.kept(run))
        gain = after["k"] - before["k"]
        most_lost = min(before["k"], after["n"] - after["k"])
        largest = 2 * binom.cdf(most_lost, 2 * most_lost + gain, 0.5)
        assert 2.0 ** (1 - gain) * (1 - 1e-9) <= run["p_value"] <= largest * (1 + 1e-9), run["seed"]


def test_advantages_spend_128_completions_a_step():
    assert STORED["advantages"]["ways"] == advantages.WAYS
    for row in STORED["advantages"]["runs"]:
        config = advantages.settings(row["name"], row["seed"])
        assert (config.batch_size, config.seed, config.max_steps) == (128, row["seed"], len(row["reward"]))


def test_objectives_differ_in_their_loss_and_let_the_clips_act():
    assert STORED["objectives"]["losses"] == list(objectives.LOSSES)
    assert len({repr(objectives.settings(name, 3)) for name in objectives.LOSSES}) == len(objectives.LOSSES)
    assert all(objectives.settings(name, 3).num_iterations == 2 for name in objectives.LOSSES)


def test_fine_tuning_used_the_best_rate_which_lies_inside_those_that_were_tried():
    stored = STORED["finetuning_comparison"]
    assert (stored["rank"], stored["steps"]) == (finetuning_comparison.RANK, finetuning_comparison.STEPS)
    best = finetuning_comparison.best_rates(stored["tuning"])
    for name, (_, rank, rates) in finetuning_comparison.METHODS.items():
        assert {row["learning_rate"] for row in stored["tuning"] if row["name"] == name} == set(rates)
        assert min(rates) < best[name] < max(rates)
        assert {row["learning_rate"] for row in stored["runs"] if row["name"] == name} == {best[name]}
        rounds = [row for row in stored["speed"] if row["name"] == name]
        assert len(rounds) >= 3 and {row["trained"] == row["parameters"] for row in rounds} == {not rank}
    assert all(run["n"] == 300 and run["k"] == run["solved"].count("1") for run in stored["runs"])


def test_fine_tuning_pairs_the_same_problems():
    rows = [{"name": "one", "seed": 7, "solved": "1110000000"}, {"name": "other", "seed": 7, "solved": "0111111000"}]
    # 4 problems only the other solves, 1 only the first: (4 - 1) / 10, and p = 2 · (1 + 5) / 2^5
    assert finetuning_comparison.paired(rows, "one", "other") == [{"seed": 7, "points": 30.0, "p": 0.375}]


# ---- notebook 10 ----


def test_the_curriculum_study_is_whole_and_its_measures_follow_from_its_counts():
    stored = STORED["curriculum"]
    found = {(run["curriculum"], run["arm"], run["seed"]) for run in stored["runs"]}
    assert found == {(group, arm, seed) for group, arms in curriculum.GROUPS.items() for arm in arms for seed in SEEDS}
    assert len(found) == len(stored["runs"]) and {row["seed"] for row in stored["fisher"]} == set(SEEDS)
    first = {}
    for run in stored["runs"]:
        assert run["num_problems"] == [curriculum.HELDOUT] * 3
        shares = [[k / curriculum.HELDOUT for k in row] for row in run["solved"]]
        assert run["measures"]["forgetting"]["value"] == approx(forgetting(shares))
        assert run["measures"]["average_accuracy"]["value"] == approx(average_accuracy(shares))
        # the arms of a seed share what came before the protection
        beginning = run["solved"][:2]
        assert first.setdefault((run["curriculum"], run["seed"]), beginning) == beginning
    assert json.loads(curriculum.MATRICES.read_text(encoding="utf-8")) == curriculum.matrices(stored["runs"])
    for name, options in curriculum.ARMS.items():
        assert name == "none" or float(name.split()[1]) == Protection(**options).strength


def test_every_method_gets_equally_many_strengths_and_the_penalties_span_four_decades():
    assert {len(grid) for grid in forgetting_study.GRIDS.values()} == {5}
    for method, grid in forgetting_study.GRIDS.items():
        if method.startswith(("ewc", "l2", "kl")):
            assert max(grid) / min(grid) == approx(1e4), method
        if method != "lower rate":
            assert list(grid) == sorted(grid)


def test_the_tuned_setting_is_the_lowest_rate_within_two_points(tmp_path):
    ledger = Ledger(tmp_path / "study.jsonl")
    for task in forgetting_study.KINDS:
        for rate, steps, solved in ((1e-3, 40, 90), (1e-3, 80, 97), (3e-3, 40, 98), (3e-4, 80, 95)):
            bits = "1" * solved + "0" * (100 - solved)
            ledger.add(phase="tune", task=task, rate=rate, steps=steps, after={task: bits, "known": "1"})
    assert forgetting_study.tuned(Ledger(ledger.path)) == {"puzzles A": (1e-3, 80), "puzzles B": (1e-3, 80)}


def test_forgetting_counts_from_where_each_task_was_learned():
    """The known skills fall from 0.8 to 0.7, and the first new task from 1.0 to 0.9: (0.1 + 0.1) / 2."""
    after = [{"known": "1" * 8, "puzzles A": "1" * 10}, {"known": "1" * 7 + "0" * 3, "puzzles A": "1" * 9 + "0"}]
    assert forgetting_study.lost({"after": after}, "A first", {"known": 0.8}) == approx(0.1)


# ---- notebook 07: a run in which a skill grows ----


def test_grpo_grew_the_skill_on_five_seeds_of_400_puzzles():
    stored = STORED["skill"]
    assert stored["grpo"]["seeds"] == list(SEEDS) and stored["before"]["n"] == 400
    assert skill.summary(Ledger(skill.LEDGER))["grpo"] == stored["grpo"]
    mean = sum(stored["grpo"]["greedy"]) / 5
    assert stored["grpo"]["greedy_gain"]["value"] == approx(mean - stored["before"]["greedy"])


def test_shuffled_rewards_are_the_same_rewards_in_another_order():
    completions, answers = [f"#### {n}" for n in range(40)], [str(n % 2) for n in range(40)]
    paid, right = skill.shuffled(0)(completions, answers), skill.accuracy_reward(completions, answers)
    assert sorted(paid) == sorted(right) and paid != right


def test_choices_follow_from_the_runs_on_five_seeds():
    stored = STORED["choices"]
    assert choices.summary(Ledger(choices.LEDGER)) == stored["choices"] and "kl" in stored["choices"]
    for name, found in stored["choices"].items():
        assert found["seeds"] == list(SEEDS), name
        for arm in found["arms"].values():
            assert arm["accuracy"]["value"] == approx(sum(arm["accuracy"]["each"]) / 5)
    assert choices.stored_differences() == stored["stored"]


def test_a_rate_is_selected_by_the_reward_and_not_by_the_truth(tmp_path):
    ledger = Ledger(tmp_path / "study.jsonl")
    for rate, reward, accuracy in ((2e-4, 1.9, 0.4), (4e-4, 2.0, 0.1)):
        ledger.add(phase="select", choice="kl", arm="with KL", rate=rate, mean_reward=reward, accuracy=accuracy)
    assert choices.best_rate(ledger, "kl", "with KL") == 4e-4


def test_no_problem_is_in_two_splits_of_the_choices():
    for model in ("tiny", "halfway"):
        keys = [{problem_key(problem) for problem in part} for part in choices.problems_of(model).values()]
        assert len(set.union(*keys)) == sum(map(len, keys)) and len(keys[1]) == 300


def test_one_command_names_every_study_of_the_notes():
    notes = {path.stem for path in (REPOSITORY / "docs" / "studies").glob("*.md")}
    assert notes <= set(studies.STUDIES)
    assert all(importlib.import_module(f"benchmarks.{name}").COMMAND for name in studies.STUDIES)


# ---- notebook 12 ----


def test_the_broken_runs_are_whole_and_their_comparisons_follow():
    stored, setups = STORED["broken_runs"], broken_runs.arms()
    assert {case.name for case in CASES} | {"untrained", "healthy", *broken_runs.CONTROLS} <= set(setups)
    assert setups["healthy"] is HEALTHY
    expected = {(arm, seed) for arm in setups for seed in (SEEDS if arm != "untrained" else [0])}
    assert {(run["arm"], run["seed"]) for run in stored["runs"]} == expected
    assert stored["comparisons"] == broken_runs.comparisons(stored["runs"])
    for run in stored["runs"]:
        assert run["accuracy"]["n"] == 300
        assert run["accuracy"]["k"] == sum(broken_runs.unpack_bits(run["correct"], 300))
        if run["arm"] != "untrained":
            config = setups[run["arm"]].config
            assert {"reward", "grad_norm", "frac_reward_zero_std"} <= set(run["curves"]) <= set(SIGNS)
            assert {len(values) for values in run["curves"].values()} == {config.max_steps}
            assert ("kl" in run["curves"]) == bool(config.beta)


@pytest.mark.parametrize(
    ("gains", "p_values", "said"),
    [
        ([0.3, 0.2, 0.1], [0.01, 0.04, 0.049], "hurts on every seed"),
        ([0.3, 0.2, 0.1], [0.01, 0.04, 0.05], "hurts"),
        ([0.3, 0.0, 0.1], [0.01, 1.0, 0.3], "mixed"),
        ([0.3, 0.3, -0.2], [0.01, 0.01, 0.01], "mixed"),
        ([0.1, -0.2, 0.0], [0.2, 0.01, 1.0], "no harm seen"),
    ],
)
def test_what_five_seeds_say_together(gains, p_values, said):
    assert broken_runs.verdict(gains, p_values) == said


# ---- reward hacking ----

PROBLEMS = [Problem("2 + 3?", "5", "basic", "2 + 3 = 5. #### 5"), Problem("4 + 5?", "9", "basic", "4 + 5 = 9. #### 9")]


class LetterTokenizer:
    """One token per letter."""

    eos_token_id = 0

    def __call__(self, texts, add_special_tokens):
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


@pytest.mark.parametrize(
    ("completions", "weights", "expected"),
    [
        # "#### 5" is right and brief; 18 letters and the end are past twice the target of 8 tokens
        (("#### 5", "4 + 5 = 9. #### 9."), reward_hacking.WEIGHTS["equal weights"], [3.0, 2.0]),
        (("#### 5", "4 + 5 = 9. #### 9."), reward_hacking.WEIGHTS["small weights"], [1.2, 1.1]),
        # eight letters and the end are nine tokens: 1 - 1/8
        (("#### 525", "#### 9"), (0.0, 0.0, 1.0), [0.875, 1.0]),
    ],
)
def test_held_out_rewards_by_hand(completions, weights, expected):
    run = Evaluation([p.prompt for p in PROBLEMS], ["basic"] * 2, list(completions), ["5", "9"], [True, True])
    assert reward_hacking.held_out_rewards(run, PROBLEMS, LetterTokenizer(), weights) == approx(expected)


def test_the_two_conditions_of_reward_hacking_differ_in_their_weights_alone():
    stored = STORED["reward_hacking"]
    assert stored["weights"] == {condition: list(weights) for condition, weights in reward_hacking.WEIGHTS.items()}
    equal, small = (reward_hacking.settings(condition, 0).to_dict() for condition in reward_hacking.WEIGHTS)
    assert {name for name in equal if equal[name] != small[name]} == {"reward_weights"}
    defaults = GRPOConfig().to_dict()  # the value of a setting that was added after the study
    for name in equal.keys() - {"reward_weights", "seed"}:
        assert stored["config"].get(name, defaults[name]) == equal[name], name
    for run in stored["runs"]:
        before, after, change = (run[f"accuracy_{name}"] for name in ("before", "after", "change"))
        assert change["difference"] == approx((after["k"] - before["k"]) / 300)
        assert run["reward_change"]["difference"] == approx(run["reward_after"] - run["reward_before"])
        assert (after["k"] > before["k"]) == (run["condition"] == "small weights")


# ---- quantization ----


def test_the_quantization_study_has_what_was_promised():
    assert len(quantization_study.MODELS) >= 5 and len(quantization_study.DOMAINS) >= 3
    assert sum(sum(sets.values()) for sets in quantization_study.DOMAINS.values()) >= 1000
    assert quantization_study.SCHEMES == ("float32", *QUANTIZATION_SCHEMES)
    stored = STORED["quantization_study"]
    assert stored["changes"] == approx_rows(quantization_study.differences(stored["lines"]))
    assert stored["verdicts"] == quantization_study.verdicts(stored["lines"], stored["changes"])
    stored = STORED["quantized_rollouts"]
    assert stored["against_float32"] == quantized_rollouts.summaries(stored["runs"])
    assert stored["verdicts"] == quantized_rollouts.verdicts(stored["runs"], stored["against_float32"])


def approx_rows(rows):
    return [{name: approx(value) if isinstance(value, float) else value for name, value in row.items()} for row in rows]


def test_a_decode_step_leaves_the_cache_as_it_was():
    model = random_model(byte_tokenizer())
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, options: seen.append(
            (tuple(options["input_ids"].shape), options["past_key_values"].get_seq_length())
        ),
        with_kwargs=True,
    )
    one = quantization_speed.decode_step(model, 3, context=5)
    one()
    one()
    assert seen == [((3, 5), 0), ((3, 1), 5), ((3, 1), 5)]


def test_sizes_and_mismatch_of_the_quantization_study():
    tokenizer = byte_tokenizer()
    model = random_model(
        tokenizer,
        sharpness=3.0,
        hidden_size=64,
        intermediate_size=96,
        stop_ids=range(0, 256, 16),
        max_position_embeddings=512,
    )
    small = quantize_model(model, "int8-dynamic")
    sizes = quantization_study.file_bytes(small)
    assert sizes["bytes"] == sizes["bytes_in_file"] > 0
    moved = quantization_study.mismatch(model, small, tokenizer)
    assert 0 < moved["mean"] < moved["largest"] and moved["kl"] > 0
    assert quantization_study.mismatch(model, model, tokenizer) == {"mean": 0.0, "largest": 0.0, "kl": 0.0}


def test_the_kernels_compared_agree_on_a_small_layer():
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for make in (quantization_kernels.dynamic_int_mm, quantization_kernels.dequantizing):
        error = (make(weight)(x) - x @ weight.t()).norm() / (x @ weight.t()).norm()
        assert error < 0.03
    assert set(quantization_kernels.WAYS) >= {"float32", "bfloat16"}


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


def test_the_contributors_page_sums_up_the_stored_mutants():
    page = (REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8").replace(",", "")
    modules = STORED["mutation"]["modules"].values()
    survivors = [row for part in modules for row in part["survivors"]]
    mutants, killed = (sum(part[name] for part in modules) for name in ("mutants", "killed"))
    assert killed + len(survivors) == mutants and all(row["judged"] for row in survivors)
    assert f"{mutants}" in page and f"{len(survivors)} that survived" in " ".join(page.split())
