"""The dashboards without a browser: each control changes what it claims to, and bad choices are explained."""

import base64
import html
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from small_policy import save_small_policy
from torch import nn

from benchmarks.step import Stopwatch
from grpo_edu.advantages import group_advantages
from grpo_edu.dashboards import (
    AdvantageExplorer,
    AskTheModel,
    ForgettingDashboard,
    HardwareMonitor,
    ObjectiveExplorer,
    PlayWords,
    QuantizationExplorer,
    RewardLab,
    RunComparer,
    TrainingDashboard,
    training,
)
from grpo_edu.dashboards.quantization import tiny_weights
from grpo_edu.dashboards.worker import SLOTS, run_slot
from grpo_edu.models import load_policy
from grpo_edu.problems.templates import data_dir
from grpo_edu.rewards import accuracy_reward

STUDY = {
    "runs": [
        {"curriculum": "two", "arm": arm, "seed": 0, "tasks": ["a", "b"], "num_problems": [10, 10], "solved": solved}
        for arm, solved in {
            "none": [[5, 1], [9, 2], [3, 8]],
            "ewc 10": [[5, 1], [9, 2], [6, 8]],
            "ewc 100": [[5, 1], [9, 2], [9, 4]],
            "l2 1": [[5, 1], [9, 2], [7, 7]],
        }.items()
    ]
    + [
        {
            "curriculum": "other",
            "arm": "none",
            "seed": 0,
            "tasks": ["c", "d"],
            "num_problems": [10, 10],
            "solved": [[0, 0], [10, 0], [5, 10]],
        }
    ]
}


@pytest.fixture
def drawn():
    """For tests that look at the picture itself."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures are made, with the values that their images tell, but not drawn, which takes most of the time."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("grpo_edu.dashboards.base._png", lambda figure: b"")


def quantization():
    torch.manual_seed(0)
    return QuantizationExplorer(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)))


def by_hand():
    explorer = AdvantageExplorer(4)
    explorer.source.value = "sliders"
    return explorer


def clip_bounds(explorer):
    """Where the dotted lines stand."""
    return [line.get_xdata()[0] for line in explorer.draw()[0].axes[0].lines if line.get_linestyle() == ":"]


# dashboard → control → (new value, what it claims to change)
EXPLORERS = {
    "advantages": (
        lambda: AdvantageExplorer(8),
        {
            "size": (4, lambda d: len(d.advantages)),
            "success": (0.5, lambda d: d.rewards()),
            "scaling": ("none", lambda d: d.advantages),
            "source": ("sliders", lambda d: d.rewards()),
        },
    ),
    "objective": (
        ObjectiveExplorer,
        {
            "ratio": (1.5, lambda d: d.token()["push"]),
            "advantage": (-1.0, lambda d: d.token()["objective"]),
            "epsilon": (0.5, lambda d: clip_bounds(d)),
            "epsilon_high": (0.5, lambda d: clip_bounds(d)),
            "reference": (2.0, lambda d: (d.token()["k1"], d.token()["k2"], d.token()["k3"])),
            "loss_type": ("cispo", lambda d: d.token()["objective"]),
        },
    ),
    "quantization": (
        quantization,
        {
            "bits": (3, lambda d: d.error()),
            "kind": ("affine", lambda d: d.quantized().q.dtype),
            "scales": ("per row", lambda d: d.quantized().scale.shape),
            "matrix": ("1", lambda d: d.weight().shape),
        },
    ),
    "forgetting": (
        lambda: ForgettingDashboard(STUDY),
        {
            "strength": ("100", lambda d: d.matrix(d.arms[-1])),
            "method": ("l2", lambda d: d.arms),
            "curriculum": ("other", lambda d: d.alt),
        },
    ),
}
TABLE = [(name, control) for name, (_, controls) in EXPLORERS.items() for control in controls]


def test_the_matrices_of_the_tiny_model_come_from_its_file_without_the_model():
    model, _ = load_policy("tiny")
    expected = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    found = tiny_weights()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("name", "control"), TABLE)
def test_each_control_changes_what_it_claims_and_what_is_shown(name, control):
    make, controls = EXPLORERS[name]
    dashboard, (value, effect) = make(), controls[control]
    before, shown = effect(dashboard), (dashboard.picture.value, dashboard.message.value)
    getattr(dashboard, control).value = value
    assert effect(dashboard) != before
    assert (dashboard.picture.value, dashboard.message.value) != shown
    assert dashboard.alt and f'alt="{dashboard.alt[:20]}' in dashboard.picture.value


def test_a_page_cannot_move_the_limits_of_a_slider():
    board = TrainingDashboard()
    for state in ({"max": 10**9, "value": 10**8}, {"value": 10**8}, {"min": -5, "value": -5}):
        board.steps.set_state(state)  # what a message of the page comes to
        assert (board.steps.min, board.steps.max) == (1, 200) and 1 <= board.steps.value <= 200
    board.steps.set_state({"value": 7})
    assert board.config().max_steps == 7


def test_sliders_are_the_rewards_and_a_tie_is_said():
    explorer = by_hand()
    for control, value in zip(explorer.sliders, (0.0, 1.0, 1.0, 0.0), strict=False):
        control.value = value
    assert explorer.rewards() == [0.0, 1.0, 1.0, 0.0]
    assert explorer.advantages == pytest.approx([-0.866, 0.866, 0.866, -0.866], abs=1e-3)  # ±0.5 / sqrt(1/3)
    assert [control.layout.display for control in explorer.sliders[:5]] == [None] * 4 + ["none"]
    for control in explorer.sliders[:4]:
        control.value = 0.7
    assert explorer.advantages == [0.0] * 4 and "no gradient" in explorer.message.value


def test_tie_chance_is_the_formula():
    explorer = AdvantageExplorer(2)
    explorer.success.value = 0.5
    assert "0.500 tie" in explorer.message.value  # 0.25 + 0.25


def test_beta_adds_the_kl_to_the_objective():
    explorer = ObjectiveExplorer()
    explorer.reference.value = 2.0
    assert explorer.token()["objective"] == pytest.approx(1.0)
    explorer.beta.value = 0.5
    # k3 = exp(-ln 2) + ln 2 - 1 = 0.1931
    assert explorer.token()["objective"] == pytest.approx(1 - 0.5 * 0.1931, abs=1e-4)


def test_sizes_are_counted_from_bits():
    explorer = quantization()
    explorer.bits.value = 4
    assert explorer.stored() == 64 * 32 / 2 + 4  # half a byte a number, one float32 scale
    explorer.measure.click()
    assert set(explorer.times) == {"float32", "int8-dynamic", "int8-weight"}
    assert all(seconds > 0 for seconds in explorer.times.values())


def test_reward_lab_pays_and_explains():
    lab = RewardLab()
    assert lab.total == 1.0 and lab.holes == []
    lab.text.value = "8 * 15 = 121. #### 71"
    assert lab.paid == {"accuracy": 1.0, "format": 1.0, "steps": 0.0, "length": 1.0}
    assert "1 written, 0 hold" in lab.message.value
    lab.weights["accuracy"].value, lab.weights["format"].value = 0.0, 1.0
    assert lab.total == 1.0 and lab.holes
    honest = lab.text.value
    lab.pick.value = lab.pick.options[1][1]
    assert lab.text.value != honest


def test_a_weight_changes_the_bars_and_the_grid_of_exploits():
    lab = RewardLab()
    lab.text.value = "#### 72"
    before = lab.picture.value
    lab.weights["format"].value = 1.0
    assert lab.total == 1.0 and lab.picture.value != before and lab.holes == []  # honest work earns 2
    lab.weights["accuracy"].value = 0.0
    assert "guess without working" in lab.holes
    assert lab.passed["guess without working"] == [True, False, True, False, False]  # the four rewards, and their sum


@pytest.mark.parametrize("rewards", [accuracy_reward, [accuracy_reward], {"mine": 3}])
def test_rewards_that_are_no_named_functions_are_refused(rewards):
    for dashboard in (RewardLab, TrainingDashboard):
        with pytest.raises(ValueError, match="rewards must be a dictionary of functions"):
            dashboard(rewards=rewards)


def test_a_custom_reward_that_raises_or_never_ends_is_shown(monkeypatch):
    monkeypatch.setattr("grpo_edu.dashboards.reward_lab._SECONDS", 0.3)

    def broken(completions, **kwargs):
        raise KeyError("no such key")

    def endless(completions, **kwargs):
        while True:
            pass

    lab = RewardLab({"broken": broken, "endless": endless})
    assert "KeyError" in lab.failures["broken"] and "cut off" in lab.failures["endless"]
    assert "KeyError" in lab.message.value and "cut off" in lab.message.value
    wait_for(lambda: not any(thread.name == "grpo_edu cut off" for thread in threading.enumerate()), 10)


def test_static_view_is_a_picture_with_a_caption_and_the_same_text_everywhere(drawn):
    explorer = AdvantageExplorer(4)
    bundle = explorer._repr_mimebundle_()
    picture = base64.b64decode(bundle["text/html"].partition("image/png;base64,")[2].partition('"')[0])
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert bundle["text/plain"] == "<AdvantageExplorer>"
    controls = "Run the cell to use its controls: Rewards, G, completions, success rate p, scale_rewards."
    assert controls in bundle["text/html"]
    assert bundle["text/html"].count("<img alt=") == 1 and "Advantages of one group. 4 rewards" in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_the_static_view_is_the_same_with_and_without_stored_runs(policy_folder, tmp_path):
    """Notebook 00 stores it, and is compared on computers that have trained and on those that have not."""
    without = AskTheModel(parent=tmp_path)
    shutil.copytree(policy_folder, tmp_path / "a-run" / "model")
    having = AskTheModel(parent=tmp_path)
    assert len(having.model.options) == len(without.model.options) + 1
    shown = having._repr_mimebundle_()["text/html"]
    assert shown == without._repr_mimebundle_()["text/html"] and shown in stored_output("00_start_here", "AskTheModel")


def stored_output(notebook, code):
    """The HTML of the cell of a notebook that holds this code."""
    path = Path(__file__).resolve().parents[1] / "notebooks" / f"{notebook}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cell = next(cell for cell in cells if cell["cell_type"] == "code" and code in "".join(cell["source"]))
    return "".join(cell["outputs"][0]["data"]["text/html"])


def test_two_dashboards_do_not_disturb_each_other():
    one, other = AdvantageExplorer(4), AdvantageExplorer(4)
    picture = other.picture.value
    one.success.value = 0.75
    assert other.picture.value == picture and other.success.value == 0.25


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    return str(save_small_policy(tmp_path_factory.mktemp("policy") / "small"))


@pytest.fixture
def board(policy_folder, tmp_path):
    board = TrainingDashboard((policy_folder,), parent=tmp_path)
    board.steps.value, board.prompts.value, board.generations.value = 2, 2, 2
    board.heldout.value, board.length.value, board.every.value = 20, 16, 1
    board.rewards.value = ("length",)
    yield board
    board.close()
    if board.worker is not None:
        board.worker.join(30)


def press_and_wait(board):
    board.start.click()
    board.worker.join(120)
    assert not board.worker.running
    return board.run


SETTINGS = {
    "generations": (4, "num_generations"),
    "prompts": (3, "prompts_per_step"),
    "steps": (3, "max_steps"),
    "length": (24, "max_completion_length"),
    "rate": (1e-3, "learning_rate"),
    "beta": (0.1, "beta"),
    "loss_type": ("dapo", "loss_type"),
    "seed": (5, "seed"),
}


@pytest.mark.parametrize("control", SETTINGS)
def test_each_setting_reaches_the_configuration(control):
    board = TrainingDashboard()
    value, field = SETTINGS[control]
    before = getattr(board.config(), field)
    getattr(board, control).value = value
    assert getattr(board.config(), field) == value != before


def test_a_run_is_drawn_judged_and_saved(board, tmp_path):
    board.beta.value = 0.1
    run = press_and_wait(board)
    assert [record["step"] for record in run.history] == [1, 2]
    assert {"kl", "entropy", "frac_reward_zero_std", "completions/mean_length"} <= set(run.history[0])
    assert list(run.checks) == [0, 1, 2] and run.after.n == run.before.n == 20
    assert "2 steps" in board.alt and re.match(r"<img [^>]*alt=", board.picture.value)
    assert "points [" in board.message.value and "McNemar" in board.message.value
    assert board.samples.value.count("<div") == 2  # one a completion of the first group
    board.save.click()
    assert "Saved in" in board.message.value
    (folder,) = tmp_path.glob("*-dashboard-seed0")
    assert {file.name for file in folder.iterdir()} >= {"config.json", "metrics.jsonl", "model", "result.json"}
    comparer = RunComparer(tmp_path)
    assert comparer.pick.value == (folder.name,)
    comparer.test.click()
    assert not comparer.busy and "Choose two runs" in comparer.tested.value
    comparer.pick.value = ()
    assert "No run is chosen" in comparer.message.value


def test_two_saved_runs_are_compared_in_pairs(board, tmp_path):
    for seed in (0, 1):
        board.seed.value = seed
        press_and_wait(board)
        board.save.click()
    comparer = RunComparer(tmp_path)
    assert len(comparer.pick.value) == 2
    comparer.test.click()
    comparer.worker.join(60)
    found = comparer.comparison
    assert found.low <= found.difference <= found.high
    assert f"p = {found.p_value:.2g}" in comparer.tested.value
    assert [label for label, _ in comparer.pick.options] == [
        f"{name}: seed {seed}" for seed, name in enumerate(comparer.pick.value)
    ]
    assert (
        "seed 0" in comparer.alt and "seed 1" in comparer.alt and "Mean reward over the steps" in comparer.curves.value
    )
    assert comparer.table.value.count("<tr>") == 2, "the seed is the only setting that differs"
    first, _ = comparer.pick.value
    (tmp_path / first / "model" / "model.safetensors").unlink()
    comparer.test.click()
    comparer.worker.join(60)
    assert "Error" in comparer.tested.value, "a model that is gone is named, not swallowed"


def test_pause_holds_resume_goes_on_and_stop_ends_within_a_second(board):
    board.steps.value, board.every.value = 200, 0
    board.start.click()
    wait_for(lambda: board.run.history)
    board.pause.click()
    time.sleep(1.0)
    done = len(board.run.history)
    time.sleep(0.5)
    assert len(board.run.history) == done and board.pause.description == "Resume"
    board.pause.click()
    wait_for(lambda: len(board.run.history) > done)
    assert board.rate.disabled
    board.stop.click()
    pressed = time.monotonic()
    assert "Stopping" in board.message.value or "Stopped" in board.message.value
    wait_for(lambda: "Stopped" in board.message.value)
    assert time.monotonic() - pressed < 5  # a second on an idle machine; the step under way is done first
    board.worker.join(30)
    assert not board.rate.disabled and len(board.run.history) < 200


def test_a_paused_run_is_offered_by_the_next_page_and_ends_as_if_it_had_not_been_paused(board, policy_folder, tmp_path):
    board.steps.value, board.every.value = 4, 0
    whole = press_and_wait(board)
    board.start.click()
    wait_for(lambda: len(board.run.history) == 1)
    board.pause.click()
    wait_for(lambda: "Paused after step" in board.message.value)
    done = len(board.run.history)
    time.sleep(0.3)
    assert "Paused after step" in board.message.value and board.pause.description == "Resume"
    later = TrainingDashboard((policy_folder,), parent=tmp_path)
    assert later.opener and "step 4" not in later.kept.label and f"step {done} of 4" in later.kept.label
    later.opener.click()
    assert f"Curves over {done} steps" in later.alt and later.pause.description == "Resume"
    later.pause.click()
    later.worker.join(60)
    assert [row["reward"] for row in later.run.history] == [row["reward"] for row in whole.history]
    assert later.run.after.correct == whole.after.correct


@pytest.mark.parametrize("place", [(training, "keep"), (training.TrainingRun, "_load")])
def test_a_pause_while_a_run_is_kept_or_evaluated_is_told(board, monkeypatch, place):
    """A pause that came while the run was being kept once waited without a word."""
    call, pressed = getattr(*place), []

    def press(*arguments):
        pressed.append(pressed or board.pause.click())
        return call(*arguments)

    monkeypatch.setattr(training, "_KEEP_EVERY", 0.0)
    monkeypatch.setattr(*place, press)
    board.steps.value = 200
    board.start.click()
    wait_for(lambda: "Paused after step" in board.message.value)
    board.stop.click()
    board.worker.join(30)
    assert "Stopped" in board.message.value


def test_a_second_run_where_one_may_run_is_explained(board, tmp_path, monkeypatch):
    monkeypatch.setenv(SLOTS, f"{tmp_path}:1")
    with run_slot():
        board.start.click()
        wait_for(lambda: "number 1 in the queue" in board.message.value)
        assert not hasattr(board.run, "policy"), "nothing is loaded before it is its turn"
        other = AskTheModel(num_generations=2, steps=5, parent=tmp_path)
        other.train.click()
        wait_for(lambda: "number 2 in the queue" in other.message.value)
        other.stop.click()
        other.worker.join(30)
        assert "Stopped" in other.message.value and other.before == []
    board.worker.join(120)
    assert len(board.run.history) == 2 and list(tmp_path.glob("queue-*")) == []


def buttons(board):
    """The first step of a dashboard, and what else can be done."""
    first = [button.description for button in board._buttons if button.button_style == "primary"]
    assert len(first) == 1
    return first[0], [one.description for one in board._buttons if "grpo-edu-off" not in one._dom_classes]


def test_one_button_is_the_next_step_and_those_that_can_do_nothing_look_off(board):
    assert buttons(board) == ("Start", ["Start"])
    board.steps.value = 30
    board.start.click()
    assert buttons(board) == ("Pause", ["Pause", "Stop"])
    wait_for(lambda: board.run.history)
    board.stop.click()
    board.worker.join(30)
    assert buttons(board) == ("Resume", ["Start", "Resume", "Save"])
    ask = AskTheModel(num_generations=2, steps=5)
    assert buttons(ask) == ("1 Ask", ["1 Ask", "3 Train"])


def test_a_run_whose_kernel_ended_was_kept_on_its_way(board, policy_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_edu.dashboards.training._KEEP_EVERY", 0.0)
    board.steps.value, board.every.value = 100, 0
    board.start.click()
    wait_for(lambda: len(board.run.history) > 2)
    later = TrainingDashboard((policy_folder,), parent=tmp_path)
    assert "of 100" in later.kept.label and "kept just now" in later.kept.label
    assert later._offer.layout.display is None
    later.opener.click()  # a copy, because the first page still has the run
    later.save.click()
    done = len(later.run.history)  # of the state, which may be a step ahead of what the first page had noted
    (saved,) = tmp_path.glob("*-dashboard-seed0")
    result = json.loads((saved / "result.json").read_text())
    assert result["interrupted"] and 0 < result["steps"] == done and result["output"] == str(saved)
    assert load_policy(saved / "model") and not (saved / "state.pt").exists()
    board.stop.click()


def test_the_picture_of_the_last_run_stays_until_there_is_one_of_the_next(board):
    press_and_wait(board)
    picture = board.picture.value
    shown = []
    board.picture.observe(lambda change: shown.append(change["new"]), "value")
    press_and_wait(board)
    assert picture and "" not in shown
    assert "the run before" not in picture and "dashed: the run before" in svg_of(shown[-1])


def svg_of(picture):
    """The text of the SVG image that a dashboard shows."""
    return base64.b64decode(picture.partition("base64,")[2].partition('"')[0]).decode()


def test_every_step_is_drawn_and_the_progress_is_shown_in_each_stage(board):
    board.steps.value, board.every.value = 3, 0
    stages, watch = [], Stopwatch()
    board._draw = watch.timed("pictures", board._draw)
    board.progress.observe(lambda change: stages.append(change["new"]), "value")
    run = press_and_wait(board)
    for stage in ("Loading the model", "Evaluating before", "Training", "Evaluating after"):
        assert any(f'aria-label="{stage}' in shown for shown in stages), stage
    assert 1 <= watch.counts["pictures"] and watch.seconds["pictures"] < 0.1 * run.training_seconds
    assert board.progress.value == ""


def press_step(board, button):
    """Press the button of a step of `AskTheModel`, and wait until it is done."""
    button.click()
    if board.worker is not None:
        board.worker.join(120)


def panel_of(board):
    """Return what the panel "what the model says" is given."""
    return json.loads(html.unescape(board.chances.value.partition("data-chances='")[2].partition("'>")[0]))


def test_ask_score_train_and_ask_again_are_four_steps(tmp_path):
    board = AskTheModel(num_generations=4, steps=5, parent=tmp_path)
    assert "Recorded before training" in board.message.value and "→" not in board.static_view()
    board.answer.value = "either this or that"
    board.ask.click()
    assert board.worker is None and "either this or that" in board.message.value
    board.answer.value = board._known[board.question.value].answer
    board.score.click()
    assert "Press 1 Ask first" in board.message.value
    board.again.click()
    assert board.worker is None and "Attention: The model is not trained yet" in board.message.value
    press_step(board, board.ask)
    assert (
        board.picture.value.count("<table") == 1 and len(board.before) == 4 and "advantage" not in board.picture.value
    )
    assert {row["right"] for row in panel_of(board)["rows"]} == {None}, "a color would say which answers are right"
    first = [row["text"] for row in board.before]
    press_step(board, board.ask)
    assert [row["text"] for row in board.before] != first, "the second group has random numbers of its own"
    assert buttons(board) == ("2 Score", ["1 Ask", "2 Score", "3 Train", "Start over"])
    board.score.click()
    rewards = torch.tensor([row["reward"] for row in board.before])
    assert [row["advantage"] for row in board.before] == pytest.approx(group_advantages(rewards, 4).tolist())
    assert "advantage" in board.picture.value and buttons(board)[0] == "3 Train"
    moves = []
    board.chances.observe(lambda change: moves.append(change["new"]), "value")
    press_step(board, board.train)
    assert board.trained == 5 and board.after == [] and len(set(moves)) >= 5, "the bars move with each step"
    assert any(abs(row["then"] - row["chance"]) > 1e-4 for row in board.before)
    assert "was trained for 5 steps" in board.message.value and buttons(board)[0] == "4 Ask again"
    press_step(board, board.again)
    assert len(board.after) == 4 and [steps for steps, _ in board.series] == [0, 5]
    assert board.picture.value.count("<table") == 2 and "After 5 steps" in board.message.value
    board.reset.click()
    assert board.trained == 0 and board.picture.value == board.chances.value == ""


def test_the_panel_has_one_row_for_each_different_answer_and_the_sum_of_the_others(tmp_path):
    board = AskTheModel(num_generations=16, steps=5, parent=tmp_path)
    press_step(board, board.ask)
    panel = panel_of(board)
    chances = [row["now"] for row in panel["rows"]]
    assert len({row["text"] for row in panel["rows"]}) == len(chances) and chances == sorted(chances, reverse=True)
    assert sum(chances) + panel["rest"]["now"] == pytest.approx(1)
    press_step(board, board.train)
    moved = {row["text"]: row["before"] for row in panel_of(board)["rows"]}
    assert all(moved[row["text"]] == row["now"] for row in panel["rows"] if row["text"] in moved)


def test_it_says_that_all_rewards_tie_and_that_a_wrong_habit_grew(tmp_path):
    board = AskTheModel(num_generations=4, steps=5, parent=tmp_path)
    board.question.value = "A fox has 7 bags of 6 nuts. 9 nuts are lost. How many nuts remain?"
    assert board.choose.value == "", "the list does not show another question"
    board.answer.value = "1000"
    press_step(board, board.ask)
    board.score.click()
    assert "0 of 4 answers are right. All rewards are equal" in board.message.value
    for row in board.before:
        row["then"] = 0.9
    board.trained = 5
    assert "This answer is wrong: training strengthened" in board.words()


@pytest.mark.long
def test_a_model_that_was_trained_in_a_page_before_answers_and_trains_on_in_the_next(policy_folder, tmp_path):
    first = AskTheModel(num_generations=2, steps=10, model=policy_folder, parent=tmp_path)
    assert "Model" not in first.progress.value
    first_said = first.message.value
    first.choose.value = first.choose.options[1][1]
    first.train.click()
    wait_for(lambda: list(tmp_path.glob(".kept/*/asked.json")) or not first.busy, 300)  # at step 5, while it continues
    later = AskTheModel(num_generations=4, model=policy_folder, parent=tmp_path)
    first.stop.click()
    first.worker.join(60)
    assert "Model" in later.progress.value and later.message.value == first_said
    kept = later.model.options[1]
    assert "small after 5 steps" in kept[0] and "kept just now" in kept[0]
    shutil.copytree(kept[1], f"{kept[1]}-2")  # two with one name, kept in the same minute
    later = AskTheModel(num_generations=4, model=policy_folder, parent=tmp_path)
    later.model.value = later.model.options[1][1]
    assert later.question.value == first.question.value and later.size.value == 2 and later.trained >= 5
    assert buttons(later)[0] == "4 Ask again" and later.picture.value.count("<table") == 1
    steps = later.trained
    later.steps.value = 5
    later.train.click()
    later.worker.join(120)
    assert later.trained == steps + 5 and [row["text"] for row in later.before] == [row["text"] for row in first.before]
    other = AskTheModel(parent=tmp_path, model=policy_folder, data="basic")
    assert len(other.model.options) == 1, "what was trained on other problems is not offered"


def test_what_smollm2_answered_before_a_run_is_shown_until_it_is_asked():
    """Long answers are improbable as a whole, so the panel shows the probability of a token."""
    board = AskTheModel(model="smollm2")
    stored = json.loads((data_dir() / "curves" / "ask_smollm2.json").read_text(encoding="utf-8"))["asked"][0]
    assert stored["question"] == board.question.value and "Recorded" in board.message.value
    panel, first = panel_of(board), stored["looks"][0]["rows"][0]
    assert "per token" in panel["names"] and panel["rest"] is None
    shares = {row["text"]: row["now"] for row in panel["rows"]}
    assert shares[first["text"]] == pytest.approx(first["chance"] ** (1 / first["tokens"]))
    assert stored["looks"][1]["rows"][0]["text"] not in board.static_view(), "what it learned is not given away"


def test_another_model_is_asked_for_an_instruction(policy_folder):
    board = AskTheModel(num_generations=2, steps=5, model=policy_folder, data="instructions")
    assert board.picture.value == "" and "Press 1 Ask" in board.message.value
    board.answer.value = "48"
    board.ask.click()
    assert board.worker is None and "must hold the constraints" in board.message.value
    board.answer.value = board._known[board.question.value].answer
    board.ask.click()
    board.worker.join(60)
    assert [row["reward"] for row in board.before] == [0.0] * 2
    assert all(row["answer"].startswith("missing: ") for row in board.before)


def test_an_error_of_the_work_is_shown_and_the_next_run_starts(policy_folder, board):
    def broken(completions, **kwargs):
        raise KeyError("no such key")

    board.functions["length"] = broken
    run = press_and_wait(board)
    assert run.history == [] and "KeyError" in board.message.value and "Attention" in board.message.value
    board.functions["length"] = lambda completions, **kwargs: [float(len(text)) for text in completions]
    assert len(press_and_wait(board).history) == 2


def test_an_impossible_choice_is_explained_and_nothing_starts(board):
    board.data.value = ()
    board.start.click()
    assert board.worker is None and "at least one set of problems" in board.message.value


def test_start_and_stop_leave_no_thread(board):
    press_and_wait(board)
    names = [thread.name for thread in threading.enumerate()]
    board.steps.value = 200
    for _ in range(3):
        board.start.click()
        board.stop.click()
        board.worker.join(60)
    assert [thread.name for thread in threading.enumerate()] == names


def test_hardware_is_looked_at_until_it_is_stopped():
    monitor = HardwareMonitor(0.5)
    assert "GiB" not in monitor.alt and not monitor.load.value  # nothing that differs from machine to machine is stored
    said = []
    monitor.message.observe(lambda change: said.append(change["new"]), "value")
    monitor.start.click()
    wait_for(lambda: monitor.looks > 2)
    assert len(said) == 1, "a screen reader would read each measurement"
    monitor.stop.click()
    monitor.worker.join(10)
    assert not monitor.worker.running
    assert "usable cores" in monitor.load.value and "available " in monitor.alt and "GiB" in monitor.alt


def wait_for(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# A process that imports PyTorch once and leaves children that compute in a thread, each at another moment.
LEAVING = """
import os, random, sys, time
import torch
from grpo_edu.dashboards import worker as workers

workers.GRACE = 0.1
step = lambda: torch.tanh(torch.ones(60, 60, requires_grad=True) @ torch.ones(60, 60)).sum().backward()

def obedient(worker):
    while True:
        worker.goes_on()
        step()

def deaf(worker):
    while True:
        step()

def interrupted(worker):
    try:
        workers.cut_off(lambda: deaf(None), 0.05, "a reward")
    except TimeoutError:
        pass

def leave(number, work, pause):
    if work is interrupted:
        workers._interrupt = lambda thread: None  # as if it waited inside a C function when it was cut off
        interrupted(None)
        workers._interrupt = interrupt
    else:
        worker = workers.Worker(work, after=lambda error: None)
        worker.start()
        time.sleep(random.Random(number).uniform(0, 0.1))
        if pause:
            worker.pause()
    sys.exit(0)

interrupt = workers._interrupt
for number in range(4):
    if (child := os.fork()) == 0:
        leave(number, [obedient, deaf, interrupted][number % 3], pause=number % 4 == 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on Windows")
def test_python_can_be_left_while_a_worker_computes():
    """Python ends daemon threads; in PyTorch's C++ code that aborted the process (SIGABRT, exit code -6)."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr) == (["0"] * 4, "")


# ---- the word game ----


def test_a_word_is_guessed_letter_by_letter():
    board = PlayWords({}, first=2)
    assert (board.problem.prompt, board.problem.answer) == ("ICE --?", "HEN")
    assert "I is not in the word" in board.message.value and "3 guesses left" in board.message.value
    for wrong in ("", "XQZ", "HENS", "<b>"):
        board.guess.value = wrong
        board._buttons[0].click()
        assert "not one of the 30 words" in board.message.value and board.turns == [] and board.guess.value == wrong
    board.guess.value = " cat"
    board.guess._handle_custom_msg({"event": "submit"}, [])  # the Enter key
    assert board.turns == [("CAT", "---")] and board.guess.value == "" and "2 guesses left" in board.message.value
    shown = board.picture.value
    assert re.search('dashed #000">E .<', shown) and re.search('solid rgba[^>]*">T −<', shown)
    assert "✗ does not fit" in shown and "✓ fits<" not in shown
    board.guess.value = "XQZ"
    board.guess._handle_custom_msg({"event": "submit"}, [])
    board.guess.value = "HEN"  # the next word waits for its own Enter key
    assert len(board.turns) == 1 and "XQZ" in board.message.value
    board.guess.value = "H"
    board.guess._handle_custom_msg({"event": "submit"}, [])
    board.guess.value = "HEN"  # of a fast typist the page sends the last letters after the Enter key
    assert board.over and "You won." in board.message.value and "1 of 1" in board.message.value
    assert "✓ fits<" in board.picture.value and 'solid #000">H +<' in board.picture.value
    board.guess.value = "PEN"
    board._buttons[0].click()
    assert "New game" in board.message.value and len(board.turns) == 2
    board._buttons[-1].click()
    assert board.turns == [] and not board.over and board.problem.answer != "HEN"
    for _ in range(3):
        board.play(board.problem.prompt[:3])
    assert board.over and board.problem.answer in board.message.value and "1 of 2" in board.message.value


def test_models_play_the_word_with_the_same_random_numbers():
    model, tokenizer = load_policy("tiny")  # it does not know the game, and writes what is not a word
    board = PlayWords({"once": model, "<again>": "tiny"}, tokenizer)
    board._buttons[1].click()
    board.worker.join(60)
    assert board.over and board.problem.answer in board.message.value
    assert board.played["once"] == board.played["<again>"] and len(board.played["once"]) == 64
    assert "once 0 of 64" in board.message.value and "&lt;again&gt;" in board.picture.value
    assert board.picture.value.count("<table>") == 3 and "<again>" not in board.picture.value


def test_what_the_word_game_cannot_use_is_said():
    with pytest.raises(ValueError, match=r"first.*299.*300"):
        PlayWords({}, first=300)
    with pytest.raises(ValueError, match=r"tokenizer.*'mine'"):
        PlayWords({"mine": nn.Linear(1, 1)})
    board = PlayWords({"gone": "no-such-model"})
    board._buttons[1].click()
    board.worker.join(60)
    assert "no-such-model" in board.message.value and "Attention" in board.message.value
