"""Pictures of advantages: what they draw, worked out by hand, and that every text can be read."""


import pytest
import torch
from pictures import assert_readable

from grpo_edu.figures_advantages import (
    advantages_by_count,
    baseline_curve,
    group_dots,
    pull_by_difficulty,
    tie_curves,
    tie_shares,
)

# one of four right, three of four right, all right
REWARDS = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1])
MEASURED = [(0.5, 0.4, 0.7), (0.2, 0.1, 0.3)]
FIGURES = {
    "dots": lambda: group_dots(REWARDS, 4),
    "curves": tie_curves,
    "shares": lambda: tie_shares([0.0, 0.4, 0.45, 1.0], [2, 8], MEASURED, {"one p": [0.5, 0.1], "each p": [0.5, 0.2]}),
    "by count": lambda: advantages_by_count(8),
    "pull": lambda: pull_by_difficulty(REWARDS, 4),
    "baseline": lambda: baseline_curve(
        [-1, 0, 1], [9, 1, 4], [6, 0.5, 3], [12, 2, 5], marks={"rewards 1 and 2": -1, "rewards 0 and 1": 0}
    ),
}


def xy(line):
    return [(float(x), round(float(y), 4)) for x, y in line.get_xydata()]


def named(axes):
    return {line.get_label(): xy(line) for line in axes.lines if not line.get_label().startswith("_")}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_group_dots_shows_rewards_means_and_advantages():
    rewards, advantages = group_dots(REWARDS[:8], 4, scale_rewards="none").axes
    assert named(rewards) == {
        "group 0": [(0, 1), (1, 0), (2, 0), (3, 0)],
        "group 1": [(4, 1), (5, 1), (6, 0), (7, 1)],
    }
    means = [xy(line)[0][1] for line in rewards.lines if line.get_label().startswith("_")]
    assert means == [0.25, 0.75]
    assert named(advantages)["group 1"] == [(4, 0.25), (5, 0.25), (6, -0.75), (7, 0.25)]


def test_tie_curves_fall_with_the_group_size():
    lines = named(tie_curves((2, 4)).axes[0])
    assert dict(lines["G = 2"])[0.5] == 0.5 and dict(lines["G = 4"])[0.5] == 0.125
    assert all(dict(line)[0.0] == dict(line)[1.0] == 1 for line in lines.values())


def test_tie_shares_shows_questions_formulas_and_what_was_measured():
    left, right = FIGURES["shares"]().axes
    assert [patch.get_height() for patch in left.patches] == [1, 0, 0, 0, 2, 0, 0, 0, 0, 1]
    assert named(right) == {"one p": [(0, 0.5), (1, 0.1)], "each p": [(0, 0.5), (1, 0.2)]}
    bars = [[float(y) for _, y in segment] for segment in right.collections[0].get_segments()]
    assert [pytest.approx(bar) for bar in bars] == [[0.4, 0.7], [0.1, 0.3]]
    assert [label.get_text() for label in right.get_xticklabels()] == ["2", "8"]


def test_advantages_by_count_of_a_group_of_four():
    """One of four right: mean 1/4, sample standard deviation 1/2."""
    scaled, centered = advantages_by_count(4).axes
    assert named(centered) == {
        "of a right one": [(1, 0.75), (2, 0.5), (3, 0.25)],
        "of a wrong one": [(1, -0.25), (2, -0.5), (3, -0.75)],
    }
    assert named(scaled)["of a right one"][0] == pytest.approx((1, 0.75 / 0.5001), abs=1e-4)
    assert named(scaled)["of a wrong one"][2] == pytest.approx((3, -0.75 / 0.5001), abs=1e-4)


def test_pull_by_difficulty_of_two_groups_that_differ_and_one_that_ties():
    one, batch = pull_by_difficulty(REWARDS, 4).axes
    # centered: 1.5 of a group with one or three right, 2 of one that is half right
    assert named(one)["centered"] == [(0, 0), (1, 0.75), (2, 1), (3, 0.75), (4, 0)]
    # scaled: 1.5 / 0.5 = 3 against 2 / 0.5774 = 3.4641
    assert named(one)["scaled"][1][1] == pytest.approx(3 / 3.4641, abs=1e-3)
    for line in named(batch).values():
        assert line == [(0, 0), (1, 50), (2, 0), (3, 50), (4, 0)]


def test_baseline_curve_draws_band_curve_and_marks_on_the_curve():
    axes = FIGURES["baseline"]().axes[0]
    assert named(axes)["the same b for all"] == [(-1, 9), (0, 1), (1, 4)]
    assert [text.get_text() for text in axes.texts] == ["rewards 1 and 2", "rewards 0 and 1"]
    assert [text.xy for text in axes.texts] == [(-1, 9), (0, 1)]
    axes.figure.draw_without_rendering()
    for text in axes.texts:  # neither over the numbers of the axis nor over the title
        assert text.get_window_extent().x0 >= axes.bbox.x0 - 5 and text.get_window_extent().y1 <= axes.bbox.y1
    band = axes.collections[0].get_paths()[0].vertices
    assert {(-1.0, 6.0), (-1.0, 12.0), (1.0, 3.0), (1.0, 5.0)} <= {(float(x), float(y)) for x, y in band}


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: group_dots(torch.zeros(3), 2), "not a multiple of num_generations"),
        (lambda: tie_shares([0.5], [2], [], {}), "measured must have one value for each of the 1 sizes, got 0"),
        (lambda: tie_shares([0.5], [2], MEASURED[:1], {"one p": []}), "one p must have one value"),
        (lambda: pull_by_difficulty(torch.tensor([1.0, 0, 0]), 3), "num_generations must be even"),
        (lambda: pull_by_difficulty(torch.tensor([1.0, 0.5]), 2), "rewards must each be 0 or 1"),
        (lambda: pull_by_difficulty(torch.ones(4), 2), "all groups tie"),
        (lambda: baseline_curve([0, 1], [1.0], [1.0], [1.0]), "must have one length"),
    ],
)
def test_figures_refuse(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
