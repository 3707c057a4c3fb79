"""The picture of reward against accuracy: the measured places, the corners, nothing clipped or covered."""

import pytest
from pictures import assert_readable

from grpo_edu.figures_rewards import reward_against_accuracy


def run(condition, reward, accuracy):
    changes = {"reward_change": reward, "accuracy_change": accuracy}
    bars = {name: {"difference": d, "low": d - 0.05, "high": d + 0.1} for name, d in changes.items()}
    return {"condition": condition, **bars}


RUNS = [run("equal weights", 0.30 + 0.01 * seed, -0.20 - 0.01 * seed) for seed in range(5)]
RUNS += [run("small weights", 0.25 + 0.01 * seed, 0.25 + 0.02 * seed) for seed in range(5)]


def test_dots_and_intervals_are_where_they_were_measured():
    (axes,) = reward_against_accuracy([run("a", 0.3, -0.2)]).axes
    (container,) = axes.containers
    dot, _, (across, along) = container
    assert dot.get_xydata().tolist() == [pytest.approx([0.3, -20])]
    assert across.get_segments()[0].tolist() == [pytest.approx([0.25, -20]), pytest.approx([0.4, -20])]
    assert along.get_segments()[0].tolist() == [pytest.approx([0.3, -25]), pytest.approx([0.3, -10])]


def test_each_condition_has_its_own_look_and_entry():
    (axes,) = reward_against_accuracy(RUNS).axes
    dots = [container[0] for container in axes.containers]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["equal weights", "small weights"]
    assert [len(dot.get_xdata()) for dot in dots] == [5, 5]
    assert len({dot.get_color() for dot in dots}) == len({dot.get_marker() for dot in dots}) == 2


@pytest.mark.parametrize("runs", [RUNS, RUNS[:5], RUNS[5:]], ids=["both", "hacked", "mended"])
def test_both_zero_lines_are_in_view(runs):
    (axes,) = reward_against_accuracy(runs).axes
    assert axes.get_xlim()[0] < 0 < axes.get_xlim()[1]
    assert axes.get_ylim()[0] < 0 < axes.get_ylim()[1]


@pytest.mark.parametrize("runs", [RUNS, RUNS[:5], RUNS[5:]], ids=["both", "hacked", "mended"])
def test_texts_lie_inside_and_apart(runs):
    assert_readable(reward_against_accuracy(runs))


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="runs is empty"):
        reward_against_accuracy([])
