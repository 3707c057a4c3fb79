"""Pictures of evaluations: what they hold, that every text is inside the picture and covers no other."""

import pytest
from pictures import assert_readable

from grpo_edu.figure_style import COLORS
from grpo_edu.figures_evaluation import interval_rows, problems_needed_chart, threshold_bars

GAINS = [0.01, 0.05, 0.2]
FIGURES = {
    "one series": lambda: interval_rows(
        {"base": [5, 0, 10]}, ["one", "two", "three"], trials=10, title="Runs", reference=0.5
    ),
    "two series": lambda: interval_rows(
        {"before": [131, 125], "after GRPO": [266, 248]}, ["seed 0", "seed 1"], trials=300, title="Seeds"
    ),
    "sixteen runs": lambda: interval_rows(
        {"base": range(100, 116)}, [f"run {run}" for run in range(16)], trials=300, title="One model, sixteen times"
    ),
    "bars": lambda: threshold_bars(
        {"one comparison, one look": 0.02, "any of five seeds, three levels": 0.31},
        threshold=0.025,
        title="False alarms",
        xlabel="share (%)",
    ),
    "problems": lambda: problems_needed_chart(
        GAINS, {"other problems": [40_000, 1500, 100], "same problems": [8000, 300, 20]}, sizes={"ours": 300}
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_interval_rows_draws_shares_and_wilson_intervals_in_percent():
    axes = interval_rows({"base": [8, 10]}, ["a", "b"], trials=10, title="Runs").axes[0]
    points = axes.lines[0].get_xydata()
    assert points[:, 0].tolist() == [80, 100]
    bars = axes.collections[0].get_segments()
    assert [x for x, _ in bars[0]] == pytest.approx([49.0, 94.3], abs=0.05)  # Wilson, 8 of 10
    assert [x for x, _ in bars[1]] == pytest.approx([72.2, 100.0], abs=0.05)
    assert axes.get_legend() is None


def test_two_series_stand_beside_each_other_with_a_legend():
    axes = FIGURES["two series"]().axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["before", "after GRPO"]
    before, after = (container.lines[0].get_ydata() for container in axes.containers)
    assert before[0] < 0 < after[0]


def test_broken_thresholds_differ_in_color_and_in_hatching():
    kept, broken = FIGURES["bars"]().axes[0].patches
    assert kept.get_hatch() != broken.get_hatch()
    from matplotlib.colors import to_hex

    assert [to_hex(bar.get_facecolor()).upper() for bar in (kept, broken)] == list(COLORS[:2])


def test_problems_needed_chart_draws_points_against_problems():
    axes = FIGURES["problems"]().axes[0]
    assert axes.lines[0].get_xdata().tolist() == pytest.approx([1, 5, 20])
    assert axes.lines[1].get_ydata().tolist() == [8000, 300, 20]
    assert [text.get_text() for text in axes.texts] == ["ours"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: interval_rows({}, ["a"], trials=3, title="t"), "counts needs at least one series"),
        (lambda: interval_rows({"x": [1, 2]}, ["a"], trials=3, title="t"), "got {'x': 2}"),
        (lambda: interval_rows({"x": [4]}, ["a"], trials=3, title="t"), "successes must lie between"),
        (lambda: threshold_bars({}, threshold=0.05, title="t", xlabel="x"), "shares must be one or more"),
        (lambda: threshold_bars({"a": 5}, threshold=0.05, title="t", xlabel="x"), "between 0 and 1"),
        (lambda: problems_needed_chart([], {}, sizes={}), "gains at least one"),
        (lambda: problems_needed_chart([0.1], {"a": [1, 2]}, sizes={}), "one number for each of the 1 gains"),
        (lambda: problems_needed_chart([0.1], {"a": [0]}, sizes={}), "must be positive"),
    ],
)
def test_refusals(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
