"""Figures: what they show, that nothing is clipped or covered, that no theme leaks in; the <img> and strict nbval."""

import base64
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import matplotlib.style
import nbformat
import pytest
from matplotlib.figure import Figure
from nbval.plugin import get_sanitize_patterns
from pictures import assert_readable

from grpo_edu.evaluation import Evaluation
from grpo_edu.figure_style import COLORS, MARKERS, moving_mean
from grpo_edu.figures import accuracy_comparison, html_image, loss_curve, training_curves

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


BEFORE = evaluation(basic=(60, 100), intermediate=(52, 100), advanced=(0, 100), coin_flip=(8, 8))
AFTER = evaluation(basic=(100, 100), intermediate=(91, 100), advanced=(85, 100), coin_flip=(0, 8))
FIGURES = {
    "five panels": lambda: training_curves(history()),
    "four panels": lambda: training_curves([{k: v for k, v in row.items() if k != "kl"} for row in history()]),
    "one step": lambda: training_curves(history(1)),
    "long run": lambda: training_curves(history(5000)),
    "long names": lambda: training_curves(history(**{"rewards/a_function_with_a_long_name/mean": 0.1})),
    "comparison": lambda: accuracy_comparison(BEFORE, AFTER),
    "one level": lambda: accuracy_comparison(evaluation(basic=(6, 10)), evaluation(basic=(10, 10))),
    "long labels": lambda: accuracy_comparison(BEFORE, AFTER, labels=("Qwen2-0.5B-Instruct", "after 30 GRPO steps")),
    "loss": lambda: loss_curve([6 / step for step in range(1, 200)], held_out={50: 0.5, 150: 0.1}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_the_style_of_figures_is_in_one_place():
    """No other module makes a figure or names a color, and no notebook draws past the package."""
    for path in (REPOSITORY / "grpo_edu").rglob("*.py"):
        code = re.sub(r">>> .*", "", path.read_text(encoding="utf-8"))
        if path.name not in ("figure_style.py", "grading_pages.py"):  # the latter: pages in two themes, no pictures
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


def curves(axes):
    """Label → y values of the thick lines."""
    return {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}


def test_training_curves_hold_the_measured_values_and_their_means():
    rows = history(6)
    figure = training_curves(rows, window=2)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "Reward", "Completion length", "Groups without a signal", "Entropy", "KL from the reference",
    ]  # fmt: skip
    assert all(axes.get_xlabel() == "step" and axes.get_ylabel() for axes in figure.axes)
    measured, mean = figure.axes[1].lines
    assert list(measured.get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(measured.get_ydata()) == [15, 16, 17, 18, 19, 20]
    assert list(mean.get_ydata()) == [15, 15.5, 16.5, 17.5, 18.5, 19.5]
    assert list(curves(figure.axes[0])) == ["total", "accuracy", "format", "steps"]


def test_a_part_that_is_the_whole_reward_is_drawn_once():
    rows = [{"reward": 0.1 * step, "rewards/accuracy_reward/mean": 0.1 * step} for step in range(4)]
    axes = training_curves(rows).axes[0]
    assert list(curves(axes)) == ["total"] and axes.get_legend() is None
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 4], "steps are counted where none are named"


def test_gaps_stay_gaps_and_a_metric_may_start_late():
    rows = [{"reward": 1.0}, {"reward": None}, {"reward": NAN}, {"reward": 2.0, "kl": 0.5}]
    figure = training_curves(rows, window=2)
    reward, kl = (list(axes.lines[0].get_ydata()) for axes in figure.axes)
    assert reward == pytest.approx([1.0, NAN, NAN, 2.0], nan_ok=True)
    assert kl == pytest.approx([NAN, NAN, NAN, 0.5], nan_ok=True)


def test_moving_mean_leaves_out_what_is_missing():
    assert moving_mean([1.0, NAN, 3.0, NAN, NAN], 2) == pytest.approx([1, 1, 3, 3, NAN], nan_ok=True)


def test_series_differ_in_color_and_marker():
    lines = [line for line in training_curves(history()).axes[0].lines if not line.get_label().startswith("_")]
    looks = {(line.get_color(), line.get_marker()) for line in lines}
    assert len(looks) == 4 and {color for color, _ in looks} == set(COLORS[:4])
    assert len(set(MARKERS)) == len(MARKERS) == len(COLORS) == len(set(COLORS))


def test_accuracy_comparison_shows_each_level_and_the_whole():
    figure = accuracy_comparison(BEFORE, AFTER)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "basic", "intermediate", "advanced", "coin flip", "all",
    ]  # fmt: skip
    shown = [text.get_text() for text in axes.texts]
    assert shown == ["60.0%", "52.0%", "0%", "100%", "39.0%", "100%", "91.0%", "85.0%", "0%", "89.6%"]
    # the bar of the first level reaches over its Wilson interval, 50.2% to 69.1% for 60 of 100
    bar = axes.collections[0].get_segments()[0]
    assert [x for x, _ in bar] == pytest.approx([50.2, 69.1], abs=0.05)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after"]


def test_accuracy_comparison_with_a_level_that_only_one_holds():
    axes = accuracy_comparison(evaluation(basic=(1, 2)), evaluation(basic=(2, 2), advanced=(1, 4))).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["basic", "advanced", "all"]
    assert [text.get_text() for text in axes.texts] == ["50.0%", "100%", "25.0%", "50.0%"]


def test_loss_curve_draws_training_and_held_out_loss():
    figure = loss_curve((4.0, 2.0, 1.0), steps=(10, 20, 30), held_out={30: 1.5, 10: 3.0}, window=2)
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    assert curves(axes) == {"training": [4.0, 3.0, 1.5], "held out": [3.0, 1.5]}
    assert list(axes.lines[-1].get_xdata()) == [10, 30]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: training_curves([]), "history is empty"),
        (lambda: training_curves([{"step": 1, "lr": 0.1}]), "none of the metrics that can be drawn: reward"),
        (lambda: training_curves([{"reward": 1.0}], window=0), "window must be at least 1"),
        (lambda: loss_curve([]), "losses is empty"),
        (lambda: loss_curve([1.0, 0.0]), "losses must be positive"),
        (lambda: loss_curve([1.0, 2.0], steps=[1]), "one length, got 1 and 2"),
        (lambda: html_image(Figure(), "  "), "alt must say what the picture shows"),
    ],
)
def test_figures_refuse(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


@pytest.mark.parametrize("name", ["five panels", "comparison"])
def test_a_dark_theme_changes_nothing_and_pyplot_is_not_touched(name):
    plain = html_image(FIGURES[name](), "x").html
    with matplotlib.style.context("dark_background"):
        assert html_image(FIGURES[name](), "x").html == plain
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


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


def sanitize(text):
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


@pytest.mark.slow
def test_strict_nbval_passes_other_pixels_and_fails_another_alt_text(tmp_path):
    setup = "import random, time\nfrom grpo_edu.figures import html_image, training_curves"
    draw = "html_image(training_curves([{'reward': random.random()} for _ in range(9)]), 'Nine rewards')"
    timed = "print(f'{time.perf_counter():.2f} s, {1 + random.random():.2f} GiB')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in (setup, draw, timed)])
    for number, cell in enumerate(notebook.cells, start=1):
        cell.execution_count = number
    stored = html_image(training_curves([{"reward": 0.5}]), "Nine rewards")
    data = {"text/plain": repr(stored), "text/html": stored.html}
    notebook.cells[1].outputs = [nbformat.v4.new_output("execute_result", data, execution_count=2)]
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", name="stdout", text="0.01 s, 9.99 GiB\n")]
    nbformat.write(notebook, tmp_path / "same.ipynb")
    notebook.cells[1].outputs[0].data["text/html"] = stored.html.replace("Nine", "Ten")
    nbformat.write(notebook, tmp_path / "other.ipynb")
    shutil.copy(SANITIZE, tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-rA", "--nbval"]
    command += ["--nbval-current-env", "--nbval-sanitize-with", SANITIZE.name, "same.ipynb", "other.ipynb"]
    environment = {**os.environ, "PYTHONPATH": str(SANITIZE.parents[1])}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    verdicts = re.findall(r"^(PASSED|FAILED) (\w+\.ipynb::Cell \d)", run.stdout, re.MULTILINE)
    assert len(verdicts) == 6, run.stdout
    assert [cell for verdict, cell in verdicts if verdict == "FAILED"] == ["other.ipynb::Cell 1"], run.stdout
