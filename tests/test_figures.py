"""Figures: what they show, that nothing is clipped or covered, that no theme leaks in; the <img> and strict nbval."""

import base64
import html
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import matplotlib.style
import nbformat
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyBboxPatch
from pictures import assert_readable
from pytest import approx

from grpo_edu.evaluation import Estimate, Evaluation
from grpo_edu.figures import advantages, continual, faulty_runs, machine, objective, quantization
from grpo_edu.figures.curves import accuracy_comparison, describe, html_image, overlaid_curves, training_curves
from grpo_edu.figures.evaluation import interval_rows, problems_needed_chart, stacked_counts, threshold_bars
from grpo_edu.figures.hover import with_values, without_values
from grpo_edu.figures.live import ACCURACY, live_curves, live_values
from grpo_edu.figures.reward_parts import reward_against_accuracy, sum_and_exploits
from grpo_edu.figures.style import COLORS, MARKERS, moving_mean
from grpo_edu.studies.exploits import EXPLOITS

SANITIZE = Path(__file__).with_name("nbval_sanitize.cfg")
REPOSITORY = Path(__file__).resolve().parents[1]
NAN = math.nan


def history(steps=30, **more):
    return [
        {
            "step": step,
            "reward": 1.2 + 0.02 * step + 0.1 * math.sin(7 * step),
            "rewards/accuracy_reward/mean": 0.5 + 0.01 * step,
            "rewards/format_reward/mean": 0.9,
            "rewards/steps_reward/mean": 0.4 + 0.02 * step,
            "completions/mean_length": 14.0 + step,
            "frac_reward_zero_std": min(1.0, step / 30),
            "entropy": 1 / (1 + step),
            "kl": 0.001 * step,
            **more,
        }
        for step in range(1, steps + 1)
    ]


def evaluation(**counts):
    """Of each level (k, n): k problems solved of n."""
    rows = [(level, row < k) for level, (k, n) in counts.items() for row in range(n)]
    n = len(rows)
    levels, correct = [level for level, _ in rows], [right for _, right in rows]
    return Evaluation([f"q{row}" for row in range(n)], levels, ["#### 1"] * n, ["1"] * n, correct)


def changed_run(condition, reward, accuracy):
    changes = {"reward_change": reward, "accuracy_change": accuracy}
    bars = {name: {"difference": d, "low": d - 0.05, "high": d + 0.1} for name, d in changes.items()}
    return {"condition": condition, **bars}


BEFORE = evaluation(basic=(60, 100), intermediate=(52, 100), advanced=(0, 100), coin_flip=(8, 8))
AFTER = evaluation(basic=(100, 100), intermediate=(91, 100), advanced=(85, 100), coin_flip=(0, 8))
REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1])  # one of four right, three of four right, all right
MEASURED = [(0.5, 0.4, 0.7), (0.2, 0.1, 0.3)]
TASKS = ("stories", "coin_flip", "sorting")
MATRIX = [[0.4, 0.5, 0.3], [0.9, 0.5, 0.0], [0.3, 1.0, 0.0], [0.05, 0.55, 0.66]]
ESTIMATES = {"none": Estimate(0.4, 0.3, 0.5), "EWC": Estimate(0.05, -0.02, 0.12)}
FAULTY = [{"reward": [0.0, 0.1, 0.2], "kl": [0.0, 1.0, 5.0]}, {"reward": [0.2, 0.3, 0.4], "kl": [0.0, 2.0, 7.0]}]
HEALTHY = [{"reward": [0.4, 0.6, 0.8]}, {"reward": [0.5, 0.7, 0.9]}]
SECONDS = {"large": [4.0, 2.0, 2.5], "small": [1.0, 1.0, 2.0], "step": [3.0, 2.0, 2.0]}
FORMATS = {"256 rows": {"fp32": 8.0, "bf16": 2.0, "int8": 16.0}, "1 row": {"fp32": 1.0, "bf16": 0.5, "int8": 0.5}}
PARTS = {
    "tiny": {"weights": 1.0, "gradients": 1.0, "cache": 0.5},
    "Qwen2-0.5B": {"weights": 20.0, "gradients": 20.0, "optimizer": 40.0, "activations": 90.0, "logits": 5.0},
}
MEMORY = [(0.0, 100_000_000), (0.5, 300_000_000), (1.0, 200_000_000), (2.0, 250_000_000)]
STAGES = [(0.0, "loading"), (0.25, "rollout"), (1.0, "learning"), (1.5, "rollout")]
PEAKS = {"as it is": 1357e6, "logits in chunks": 782e6, "gradient checkpointing": 300e6}
GUESSES = {"as it is": 1500e6, "logits in chunks": 800e6, "gradient checkpointing": 280e6}
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
PUSHES = {"grpo": torch.tensor([[0.2, 0.2, 0.0], [-0.1, 0.0, -0.4]]), "dapo": torch.zeros(2, 3)}
STOPPED = {"grpo": torch.tensor([[False, False, False], [False, True, False]])}
PANELS = {"Bias": {"k1": [0.0, 0.0, 0.0], "k3": [0.0, 0.1, 0.3]}, "Spread": {"k3": [1.0, 1.0, 2.0]}}
CHANGES = [
    {"model": model, "scheme": scheme, "difference": 0.01 * n, "low": 0.01 * n - 0.02, "high": 0.01 * n + 0.02}
    for n, (model, scheme) in enumerate([("a", "bf16"), ("a", "int8"), ("b", "bf16"), ("b", "int8")])
]
HACKED = [changed_run("equal weights", 0.30 + 0.01 * seed, -0.20 - 0.01 * seed) for seed in range(5)]
SOUND = [changed_run("small weights", 0.25 + 0.01 * seed, 0.25 + 0.02 * seed) for seed in range(5)]
FALSE_ALARMS = {"one comparison, one look": 0.02, "any of five seeds, three levels": 0.31}
NEEDED = {"other problems": [40_000, 1500, 100], "same problems": [8000, 300, 20]}

FIGURES = {
    "five panels": lambda: training_curves(history()),
    "four panels": lambda: training_curves([{k: v for k, v in row.items() if k != "kl"} for row in history()]),
    "two panels and a headline": lambda: training_curves(
        history(), metrics=("reward", "completions/mean_length"), title="Reward and length rise"
    ),
    "one step": lambda: training_curves(history(1)),
    "long run": lambda: training_curves(history(5000)),
    "long names": lambda: training_curves(history(**{"rewards/a_function_with_a_long_name/mean": 0.1})),
    "stacked counts": lambda: stacked_counts(
        {"before": {"long": (160, 150), "short": (40, 3)}, "after": {"long": (200, 190), "short": (0, 0)}},
        title="Longer answers",
        xlabel="answers",
    ),
    "comparison": lambda: accuracy_comparison(BEFORE, AFTER),
    "one level": lambda: accuracy_comparison(evaluation(basic=(6, 10)), evaluation(basic=(10, 10))),
    "group dots": lambda: advantages.group_dots(REWARDS, 4),
    "sum and exploits": lambda: sum_and_exploits(
        {"this completion": {"accuracy": 0.0, "format": 0.7, "steps": -0.5}, "the honest one": {"accuracy": 1.0}},
        {exploit.name: [True, False, True] for exploit in EXPLOITS},
        ["accuracy", "format", "sum"],
    ),
    "two runs": lambda: overlaid_curves({"seed 0": history(), "seed 1": history()}),
    "group and ties": lambda: advantages.group_and_ties(REWARDS[:4], 4, 0.5),
    "tie curves": advantages.tie_curves,
    "tie shares": lambda: advantages.tie_shares(
        [0.0, 0.4, 0.45, 1.0], [2, 8], MEASURED, {"one p": [0.5, 0.1], "each p": [0.5, 0.2]}
    ),
    "by count": lambda: advantages.advantages_by_count(8),
    "pull": lambda: advantages.pull_by_difficulty(REWARDS, 4),
    "baseline": lambda: advantages.baseline_curve(
        [-1, 0, 1], [9, 1, 4], [6, 0.5, 3], [12, 2, 5], marks={"rewards 1 and 2": -1, "rewards 0 and 1": 0}
    ),
    "one matrix": lambda: continual.matrix_figure(MATRIX, TASKS),
    "two matrices": lambda: continual.matrix_figure({"supervised": MATRIX, "GRPO": MATRIX}, TASKS),
    "three matrices": lambda: continual.matrix_figure({"none": MATRIX, "EWC": MATRIX, "replay": MATRIX}, TASKS),
    "estimates": lambda: continual.estimates_figure({"forgetting": ESTIMATES}, title="Forgetting"),
    "two groups": lambda: continual.estimates_figure({"kept": ESTIMATES, "learned": ESTIMATES}, title="Both"),
    "four groups": lambda: continual.estimates_figure(dict.fromkeys("abcd", ESTIMATES), title="Four measures"),
    "vital signs": lambda: faulty_runs.metric_curves({"A": (FAULTY, HEALTHY), "B": (FAULTY, [])}, ["reward", "kl"]),
    "treatments": lambda: faulty_runs.treatments({"A": ([0.0, 0.1], [0.5]), "B": ([1.0], [0.4, 0.6])}),
    "outcomes": lambda: faulty_runs.outcomes(
        {"lr": ([0.0, 0.2], [0.8, 0.9]), "kl": ([0.5], [0.6])}, base=(0.4, 0.3, 0.5)
    ),
    "one series": lambda: interval_rows({"base": [8, 10]}, ["one", "two"], trials=10, title="Runs", reference=0.5),
    "two series": lambda: interval_rows(
        {"before": [131, 125], "after GRPO": [266, 248]}, ["seed 0", "seed 1"], trials=300, title="Seeds"
    ),
    "sixteen runs": lambda: interval_rows(
        {"base": range(100, 116)}, [f"run {run}" for run in range(16)], trials=300, title="One model, sixteen times"
    ),
    "thresholds": lambda: threshold_bars(FALSE_ALARMS, threshold=0.025, title="False alarms", xlabel="share (%)"),
    "problems needed": lambda: problems_needed_chart([0.01, 0.05, 0.2], NEEDED, sizes={"ours": 300}),
    "threads": lambda: machine.thread_curves([1, 2, 4], SECONDS, cores=2),
    "formats": lambda: machine.format_bars(FORMATS),
    "parts": lambda: machine.stacked_bars(PARTS, title="Memory", unit="GiB"),
    "memory": lambda: machine.memory_curve(MEMORY, STAGES, libraries=50_000_000),
    "peaks": lambda: machine.peak_bars(PEAKS, GUESSES),
    "clip": objective.clip_curves,
    "cispo": lambda: objective.clip_curves(loss_type="cispo", epsilon_high=1.5),
    "lines": lambda: objective.line_panels(
        [1, 10, 100], PANELS, xlabel="KL", ylabels=["nats"] * 2, xscale="log", guides=[2]
    ),
    "strip": lambda: objective.token_strip(["position", "␣", "(end)"] * 7, [0.0, 0.5, 1.0] * 7, title="Probability"),
    "pushes": lambda: objective.token_push_maps(PUSHES, MASK, row_labels=["right, short", "wrong"], stopped=STOPPED),
    "interval table": lambda: quantization.interval_table(CHANGES, margin=0.03, title="Accuracy"),
    "hacked": lambda: reward_against_accuracy(HACKED),
    "both": lambda: reward_against_accuracy(HACKED + SOUND),
}


def lines(axes):
    """Label → points of the labeled lines."""
    return {
        line.get_label(): [(approx(x, abs=1e-3), approx(y, abs=1e-3)) for x, y in line.get_xydata().tolist()]
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def texts(axes):
    return [text.get_text() for text in axes.texts]


def rows(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def bars(axes):
    return [(approx(bar.get_x()), approx(bar.get_width())) for bar in axes.patches]


def spans(axes, coordinate):
    """From where to where the intervals of a picture reach along x (0) or y (1), one list per series."""
    return [
        [approx(sorted(segment[:, coordinate].tolist()), abs=0.05) for segment in container.lines[2][0].get_segments()]
        for container in axes.containers
    ]


# figure → what is read from its panels, and the numbers that were worked out by hand
NUMBERS = {
    # the interval of the first level is Wilson's for 60 of 100
    "comparison": (
        lambda axes: (rows(axes)[-2:], texts(axes)[5:7], spans(axes, 0)[0][0]),
        (["coin flip", "all"], ["100%", "91.0%"], [50.2, 69.1]),
    ),
    "tie curves": (lambda axes: [lines(axes)[f"G = {size}"][50] for size in (2, 4)], [(0.5, 0.5), (0.5, 0.125)]),
    "tie shares": (
        lambda left, right: ([patch.get_height() for patch in left.patches], spans(right, 1)),
        ([1, 0, 0, 0, 2, 0, 0, 0, 0, 1], [[[0.4, 0.7], [0.1, 0.3]]]),
    ),
    # one of eight right: mean 1/8, sample standard deviation 0.3536
    "by count": (
        lambda scaled, centered: (
            lines(scaled)["of a right completion"][0],
            lines(centered)["of a wrong completion"][0],
        ),
        ((1, 0.875 / 0.3537), (1, -0.125)),
    ),
    # of one group, centered: 1.5 with one or three right and 2 with two; scaled: 1.5 / 0.5 against 2 / 0.5774
    "pull": (
        lambda one, batch: (lines(one)["centered"], lines(one)["scaled"][1], lines(batch)["scaled"]),
        ([(0, 0), (1, 0.75), (2, 1), (3, 0.75), (4, 0)], (1, 3 / 3.4641), [(0, 0), (1, 50), (2, 0), (3, 50), (4, 0)]),
    ),
    "baseline": (
        lambda axes: (lines(axes)["the same b for all"], [text.xy for text in axes.texts]),
        ([(-1, 9), (0, 1), (1, 4)], [(-1, 9), (0, 1)]),
    ),
    "one matrix": (
        lambda axes: (texts(axes), [(patch.get_x() + 0.46, patch.get_y() + 0.46) for patch in axes.patches]),
        ([f"{100 * share:.0f}" for row in MATRIX for share in row], [approx((n, n + 1)) for n in range(3)]),
    ),
    "estimates": (lambda axes: spans(axes, 0), [[[30, 50], [-2, 12]]]),
    "treatments": (
        lambda first, second: (lines(first)["faulty"], lines(first)["fixed"]),
        ([(1, 0), (2, 0.1)], [(3, 0.5)]),
    ),
    "outcomes": (
        lambda axes: [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 2.5],
        approx([10, 85, 50, 60]),
    ),
    "one series": (lambda axes: spans(axes, 0), [[[49.0, 94.3], [72.2, 100]]]),  # Wilson's for 8 and 10 of 10
    "thresholds": (lambda axes: [to_hex(bar.get_facecolor()).upper() for bar in axes.patches], list(COLORS[:2])),
    "problems needed": (lambda axes: lines(axes)["same problems"], [(1, 8000), (5, 300), (20, 20)]),
    "threads": (
        lambda axes: (lines(axes)["large"], lines(axes)["ideal"]),
        ([(0, 1), (1, 2), (2, 1.6)], [(0, 1), (1, 2), (2, 2)]),
    ),
    "formats": (lambda axes: [bar.get_width() for bar in axes.patches], [1, 1, 4, 2, 0.5, 2]),
    "parts": (lambda axes: (bars(axes)[6:8], texts(axes)), ([(2.5, 0), (40, 40)], ["2.5", "175"])),
    "memory": (
        lambda axes: (lines(axes)["peak"], bars(axes), [patch.get_facecolor()[:3] for patch in axes.patches]),
        ([(0.5, 250)], [(0, 0.25), (0.25, 0.75), (1, 0.5), (1.5, 0.5)], [to_rgb(COLORS[n]) for n in (0, 1, 2, 1)]),
    ),
    "peaks": (
        lambda axes: (bars(axes), lines(axes)["estimated"]),
        ([(0, 1357), (0, 782), (0, 300)], [(1500, 0), (800, 1), (280, 2)]),
    ),
    "strip": (lambda axes: texts(axes)[:3], ["position", "0.00", "␣"]),
    "pushes": (lambda grpo, dapo: (texts(grpo), texts(dapo)), ([".20", ".20", "−.10", "×", "−.40"], [".00"] * 5)),
    "interval table": (lambda axes: spans(axes, 0), [[[-2, 2], [0, 4]], [[-1, 3], [1, 5]]]),
    "hacked": (
        lambda axes: (
            axes.containers[0].lines[0].get_xydata()[0].tolist(),
            axes.get_ylim()[1] > 0,
            spans(axes, 0)[0][0],
        ),
        (approx([0.3, -20]), True, [0.25, 0.4]),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_figures_show_the_numbers_they_were_given(name):
    read, expected = NUMBERS[name]
    assert read(*FIGURES[name]().axes) == expected


# what is refused, and the argument or value that the message must name
REFUSED = [
    (lambda: training_curves([]), "history"),
    (lambda: training_curves([{"step": 1, "lr": 0.1}]), "reward"),
    (lambda: training_curves([{"reward": 1.0}], window=0), "window"),
    (lambda: advantages.group_dots(torch.zeros(3), 2), "num_generations"),
    (lambda: advantages.pull_by_difficulty(torch.tensor([1.0, 0, 0]), 3), "num_generations.* 3"),
    (lambda: advantages.pull_by_difficulty(torch.tensor([1.0, 0.5]), 2), "rewards"),
    (lambda: advantages.pull_by_difficulty(torch.ones(4), 2), "all groups tie"),
    (lambda: faulty_runs.metric_curves({"A": (FAULTY, HEALTHY)}, ["pulse"]), "signs.*pulse.*reward"),
    (lambda: interval_rows({"x": [4]}, ["a"], trials=3, title="t"), "successes.* 4"),
    (lambda: machine.thread_curves([2, 4], {"a": [1.0, 1.0]}, cores=4), r"threads.*\[2, 4\]"),
    (lambda: objective.clip_curves(loss_type="ppo"), "loss_type"),
    (lambda: live_curves([], 3), "history"),
]


@pytest.mark.parametrize(("draw", "message"), REFUSED)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


def test_live_curves_are_as_long_as_the_run_and_end_at_the_last_mean():
    history = [{"step": 0, ACCURACY: 0.4}, {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7, ACCURACY: 0.6}]
    svg = live_curves(history, 4)
    assert "Reward" in svg and "Held-out accuracy" in svg and "step 4" in svg and ">0.6<" in svg  # (0.5 + 0.7) / 2
    ends = [float(points.split()[-1].split(",")[0]) for points in re.findall(r'points="([^"]+)"', svg)]
    left, right = (float(re.search(rf'{name}="([0-9.]+)"', svg)[1]) for name in ("x1", "x2"))
    assert ends[0] == pytest.approx((left + right) / 2), "step 2 of 4 is in the middle"


def test_letters_of_live_curves_are_dark_and_marks_have_the_colors():
    row = {"step": 1, "reward": 0.5, "rewards/accuracy_reward/mean": 0.2, "rewards/format_reward/mean": 0.3}
    svg = live_curves([row, {**row, "step": 2}], 3)
    assert set(re.findall(r'<tspan style="fill:#\w+">(.+?)<', svg)) == {"●"} and "<text style" not in svg
    assert not re.search(r"<text [^>]*fill:", svg)


def test_live_curves_lie_over_those_of_the_run_before_up_to_the_last_step():
    history = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7}]
    longer = [{"step": step, "reward": 0.1 * step} for step in (1, 2, 3, 9)]
    svg = live_curves(history, 3, previous=longer)
    dashed = re.findall(r'points="([^"]+)"[^>]*stroke-dasharray', svg)
    assert len(dashed) == 1 and len(dashed[0].split()) == 3, "step 9 is after the end of this run"
    assert "dasharray" not in live_curves(history, 3)


def test_values_under_the_pointer_are_those_of_the_curves_and_lie_where_the_picture_has_them():
    history = [{"step": 0, ACCURACY: 0.4}, {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7, ACCURACY: 0.6}]
    reward, accuracy = live_values(history, 4, previous=[{"step": 1, "reward": 0.1}, {"step": 9, "reward": 0.2}])
    assert reward["lines"][0] == ["measured", [1, 2], [0.5, 0.7]]
    assert reward["lines"][-1] == ["the run before", [1], [0.1]]
    assert accuracy["lines"] == [["measured", [0, 2], [0.4, 0.6]]] and accuracy["x"] == [0, 4]
    svg = live_curves(history, 4)
    wide = float(re.search(r'width="([0-9.]+)"', svg)[1])
    left, right = (float(re.search(rf'{name}="([0-9.]+)"', svg)[1]) / wide for name in ("x1", "x2"))
    assert [reward["at"][0], reward["at"][0] + reward["at"][2]] == pytest.approx([left, right], abs=1e-3)
    page = with_values('<img alt="a">', [{**reward, "along": "it's"}])
    assert json.loads(html.unescape(re.search(r"data-values='([^']*)'", page)[1]))[0]["along"] == "it's"
    assert without_values(page) == '<img alt="a">'


def test_the_style_of_figures_is_in_one_place():
    """No other module makes a figure or names a color, and no notebook draws past the package."""
    for path in (REPOSITORY / "grpo_edu").rglob("*.py"):
        code = re.sub(r">>> .*", "", path.read_text(encoding="utf-8"))
        if path.name not in ("style.py", "pages.py"):  # the latter: pages in two themes
            assert not re.findall(r"\bFigure\(|import matplotlib\.pyplot|rcParams\[|#[0-9A-Fa-f]{6}\b", code), path.name
    for path in [*(REPOSITORY / "notebooks").glob("*.ipynb"), *(REPOSITORY / "solutions").glob("*.ipynb")]:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "code":
                assert not re.findall(r"^\s*(?:import|from) matplotlib|\bplt\.", cell.source, re.MULTILINE), path.name


@pytest.mark.parametrize("name", ["five panels", "four panels", "long names"])
def test_the_legend_covers_no_curve(name):
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    axes = figure.axes[0]
    box = axes.get_legend().get_window_extent()
    for line in axes.lines:
        points = axes.transData.transform(line.get_xydata())
        assert not any(box.contains(x, y) for x, y in points), line.get_label()


def test_training_curves_hold_the_measured_values_and_their_means():
    figure = training_curves(history(6), window=2)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Reward", "Completion length", "Groups without a signal", "Entropy", "KL from the reference"]
    measured, mean = figure.axes[1].lines
    assert list(measured.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(measured.get_ydata()) == [15, 16, 17, 18, 19, 20]
    assert list(mean.get_ydata()) == [15, 15.5, 16.5, 17.5, 18.5, 19.5]
    reward = figure.axes[0]
    assert list(lines(reward)) == ["total", "accuracy", "format", "steps"]
    looks = {(line.get_color(), line.get_marker()) for line in reward.lines if line.get_label() in lines(reward)}
    assert {color for color, _ in looks} == set(COLORS[:4]) and {marker for _, marker in looks} == set(MARKERS[:4])


def test_a_part_that_is_the_whole_reward_is_drawn_once():
    rows = [{"reward": 0.1 * step, "rewards/accuracy_reward/mean": 0.1 * step} for step in range(4)]
    axes = training_curves(rows).axes[0]
    assert list(lines(axes)) == ["total"] and axes.get_legend() is None
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 4], "steps are counted if none are named"


def test_gaps_stay_gaps_and_a_metric_may_start_late():
    rows = [{"reward": 1.0}, {"reward": None}, {"reward": NAN}, {"reward": 2.0, "kl": 0.5}]
    reward, kl = (list(axes.lines[0].get_ydata()) for axes in training_curves(rows, window=2).axes)
    assert reward == approx([1.0, NAN, NAN, 2.0], nan_ok=True)
    assert kl == approx([NAN, NAN, NAN, 0.5], nan_ok=True)
    assert moving_mean([1.0, NAN, 3.0, NAN, NAN], 2) == approx([1, 1, 3, 3, NAN], nan_ok=True)


def test_training_curves_draw_the_panels_that_are_asked_for_and_no_others():
    figure = training_curves(history(6), metrics=["entropy", "reward"], title="The reward rises")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Reward", "Entropy"]
    assert figure.get_suptitle() == "The reward rises"


def test_accuracy_comparison_with_a_level_that_only_one_evaluation_has():
    axes = accuracy_comparison(evaluation(basic=(1, 2)), evaluation(basic=(2, 2), advanced=(1, 4))).axes[0]
    assert rows(axes) == ["basic", "advanced", "all"] and texts(axes) == ["50.0%", "100%", "25.0%", "50.0%"]


def test_group_dots_shows_rewards_means_and_advantages():
    rewards, scaled = advantages.group_dots(REWARDS[:8], 4).axes
    assert lines(rewards) == {"group 0": [(0, 1), (1, 0), (2, 0), (3, 0)], "group 1": [(4, 1), (5, 1), (6, 0), (7, 1)]}
    means = [line.get_ydata()[0] for line in rewards.lines if line.get_label().startswith("_")]
    assert means == [0.25, 0.75]
    assert lines(scaled)["group 1"] == [(4, 0.5), (5, 0.5), (6, -1.5), (7, 0.5)]


# options → −gradient of the loss by ratio, for the advantages +1 and −1, and the dotted lines
CLIPS = [
    ({"epsilon": 0.2}, {0.5: 0.5, 1.0: 1.0, 1.5: 0.0}, {0.5: 0.0, 1.0: -1.0, 1.5: -1.5}, [0.8, 1.2]),
    ({"epsilon": 0.2, "epsilon_high": 0.28}, {1.25: 1.25, 1.3: 0}, {1.5: -1.5, 1.7: -1.7}, [0.8, 1.28]),
    ({"loss_type": "cispo", "epsilon_high": 1.5}, {0.5: 0.5, 1.5: 1.5, 2.0: 1.5}, {2.0: -1.5}, [1.5]),
]


@pytest.mark.parametrize(("options", "right", "wrong", "bounds"), CLIPS)
def test_clip_curves_by_hand(options, right, wrong, bounds):
    _, push = objective.clip_curves(**options).axes
    for label, expected in (("A = +1", right), ("A = −1", wrong)):
        (line,) = (line for line in push.lines if line.get_label() == label)
        values = {round(x, 6): y for x, y in line.get_xydata().tolist()}
        assert {ratio: values[ratio] for ratio in expected} == approx(expected)
    assert [line.get_xdata()[0] for line in push.lines if line.get_linestyle() == ":"] == approx(bounds)


def test_a_label_has_one_look_in_all_panels_and_the_legend_names_it_once():
    figure = FIGURES["lines"]()
    k1, k3, _, again, guide = (line for axes in figure.axes for line in axes.lines)
    assert (k3.get_color(), k3.get_marker()) == (again.get_color(), again.get_marker()) and guide.get_ydata()[0] == 2
    assert k1.get_color() != k3.get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["k1", "k3"]
    assert not objective.line_panels([1, 2], {"Loss": {"loss": [0, 1]}}, xlabel="step", ylabels=["nats"]).legends


def test_pushes_up_are_blue_and_pushes_down_are_vermilion():
    up, _, down, none, hard = (patch.get_facecolor()[:3] for patch in FIGURES["pushes"]().axes[0].patches)
    assert up[2] > up[0] and down[0] > down[2]
    assert none == (1, 1, 1) and sum(hard) < sum(down)


def colored(axes, number):
    return [approx(line.get_ydata().tolist()) for line in axes.lines if line.get_color() == COLORS[number]]


def test_vital_signs_draws_each_seed_their_mean_and_the_healthy_range():
    reward, _, kl, _ = FIGURES["vital signs"]().axes
    assert colored(reward, faulty_runs.SICK) == [[0.0, 0.1, 0.2], [0.2, 0.3, 0.4], [0.1, 0.2, 0.3]]
    assert colored(reward, faulty_runs.HEALTHY) == [[0.45, 0.65, 0.85]]
    corners = {(x, round(y, 6)) for x, y in reward.collections[0].get_paths()[0].vertices}
    assert {(1, 0.4), (1, 0.5), (3, 0.8), (3, 0.9)} <= corners
    assert colored(kl, faulty_runs.HEALTHY) == [] and not kl.collections, "the healthy runs have no KL"
    short = [{"reward": [0.0, 0.1]}, {"reward": [0.2, 0.3, 0.4]}]
    (axes,) = faulty_runs.metric_curves({"A": (short, [])}, ["reward"]).axes
    assert colored(axes, faulty_runs.SICK)[-1] == [0.1, 0.2], "a run that ended early shortens the mean"


def test_every_text_of_the_decision_tree_stays_in_its_box():
    figure, size = faulty_runs.decision_tree(), len(faulty_runs.TREE)
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    assert texts(axes).count("yes") == size and texts(axes).count("no") == size - 1
    boxes = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    assert len(boxes) == 2 * size
    for text in axes.texts:
        if text.get_text() not in ("", "yes", "no"):
            at = text.get_window_extent()
            inside = [box for box in boxes if box.x0 <= at.x0 and at.x1 <= box.x1 and box.y0 <= at.y0 <= box.y1]
            assert len(inside) == 1, text.get_text()


@pytest.mark.parametrize("name", [pytest.param("five panels", marks=pytest.mark.long), "comparison"])
def test_a_dark_theme_changes_nothing_and_pyplot_is_not_touched(name):
    pyplot = sys.modules.get("matplotlib.pyplot")
    figures_of_others = pyplot.get_fignums() if pyplot else []
    plain = html_image(FIGURES[name](), "x").html
    with matplotlib.style.context("dark_background"):
        assert html_image(FIGURES[name](), "x").html == plain
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == figures_of_others


class Images(HTMLParser):
    def handle_starttag(self, tag, attributes):
        self.tag, self.attributes = tag, dict(attributes)


def test_html_image_is_an_img_with_alt_that_shrinks_with_its_cell():
    alt = 'Reward "rises" from <40% & stays'
    image = html_image(training_curves(history(3)), alt)
    parser = Images()
    parser.feed(image._repr_html_())
    assert (parser.tag, parser.attributes["alt"]) == ("img", alt)
    assert "max-width:100%" in parser.attributes["style"]
    scheme, _, payload = parser.attributes["src"].partition(",")
    assert scheme == "data:image/png;base64"
    assert base64.b64decode(payload, validate=True).startswith(b"\x89PNG")
    assert repr(image) == f"<image: {alt}>"


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_readable_and_says_in_words_what_it_shows(name):
    """Every text lies inside the picture and overlaps no other."""
    figure = FIGURES[name]()
    assert_readable(figure)
    said = describe(figure)
    assert "\n" not in said and "mathdefault" not in said
    for axes in figure.axes:
        assert " ".join(axes.get_title(loc="left").split()) in said
        for label in axes.get_legend_handles_labels()[1]:
            assert str(label) in said
    if name == "tie curves":
        assert "G = 4 from 1 to 1, lowest 0.125" in said.partition("≈")[2]
    assert ", ," not in said


def test_the_words_for_rows_with_intervals_have_their_values():
    said = describe(interval_rows({"before": [5, 7], "after": [6, 9]}, ["one", "two"], trials=10, title="Runs"))
    assert said.endswith("Values: ≈ before: one 50, two 70; after: one 60, two 90")
    said = describe(FIGURES["outcomes"]())
    assert "before training, with 95% interval 40" in said and "lr: faulty 0 to 20, lr: fixed 80 to 90" in said


def sanitize(text):
    from nbval.plugin import get_sanitize_patterns

    for pattern, replacement in get_sanitize_patterns(SANITIZE.read_text(encoding="utf-8")):
        text = re.sub(pattern, replacement, text)
    return text


def test_sanitizing_forgets_the_pixels_and_keeps_the_alt_text():
    one, two = (html_image(training_curves(history(steps)), "Reward rises").html for steps in (3, 4))
    assert one != two and sanitize(one) == sanitize(two)
    assert 'alt="Reward rises"' in sanitize(one) and len(sanitize(one)) < 200


@pytest.mark.parametrize(
    ("text", "sanitized"),
    [
        ("trained in 12.3 s", "trained in DURATION"),
        ("17 seconds, 850 ms, 3 µs", "DURATION, DURATION, DURATION"),
        ("1 min 5 s", "DURATION"),
        ("2.5 minutes left", "DURATION left"),
        ("15,000 tokens/s", "SPEED"),
        ("1.9 steps per second", "SPEED"),
        ("peak 1.25 GiB of 8 GB", "peak MEMORY of MEMORY"),
        ("saved in /tmp/run-x1/model.", "saved in TEMPORARY"),
        ("<function f at 0x7f3a>", "<function f at ADDRESS>"),
        ("next to others ≈ 12 products, 3 at once", "next to others ≈"),
        # what a notebook is about stays
        ("reward 0.75, 30 steps, 48 tokens", None),
        ("A machine fills 12 bottles a minute for 30 minutes.", None),
        ("accuracy 60.0% [50.2, 69.1], p = 0.0386", None),
        ("tensor([[1., 2.], [3., 4.]])", None),
        ("14 + 34 = 48. #### 48", None),
    ],
)
def test_sanitizing_forgets_the_machine_and_nothing_else(text, sanitized):
    assert sanitize(text) == (sanitized or text)
