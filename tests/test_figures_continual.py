"""Pictures of continual learning: what they show, and that no text is cut off or covered."""

import pytest
from pictures import assert_readable

from grpo_edu.figures_continual import (
    estimates_figure,
    fisher_shares_figure,
    matrix_figure,
    stability_figure,
    valley_figure,
)
from grpo_edu.forgetting import Estimate

TASKS = ("stories", "coin_flip", "sorting")
MATRIX = [[0.4, 0.5, 0.3], [0.9, 0.5, 0.0], [0.3, 1.0, 0.0], [0.05, 0.55, 0.66]]
ESTIMATES = {"none": Estimate(0.4, 0.3, 0.5), "EWC": Estimate(0.05, -0.02, 0.12)}
BOWLS = ((0.0, 0.0), (1.0, 9.0)), ((2.0, 1.0), (1.0, 1.0))
FIGURES = {
    "one matrix": lambda: matrix_figure(MATRIX, TASKS),
    "two matrices": lambda: matrix_figure({"supervised": MATRIX, "GRPO": MATRIX}, TASKS),
    "three matrices": lambda: matrix_figure({"none": MATRIX, "EWC": MATRIX, "replay": MATRIX}, TASKS),
    "estimates": lambda: estimates_figure({"forgetting": ESTIMATES}, title="Forgetting"),
    "two groups": lambda: estimates_figure({"kept": ESTIMATES, "learned": ESTIMATES}, title="Both"),
    "stability": lambda: stability_figure({"EWC": {"10": (0.4, 0.9), "1000": (0.8, 0.7)}, "L2": {"1": (0.5, 0.6)}}),
    "shares": lambda: fisher_shares_figure({"true": {"a": 0.2, "b": 0.8}, "lightning": {"a": 0.7, "b": 0.3}}),
    "valley": lambda: valley_figure(*BOWLS, {"plain": [(0, 0), (1, 0.4), (2, 1)], "EWC": [(0, 0), (1.5, 0.1)]}),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_matrix_shows_each_number_and_frames_a_stages_own_task():
    (axes,) = matrix_figure(MATRIX, TASKS).axes
    assert [text.get_text() for text in axes.texts] == [f"{100 * share:.0f}" for row in MATRIX for share in row]
    frames = [(patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2) for patch in axes.patches]
    assert frames == [pytest.approx((task, task + 1)) for task in range(3)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["stories", "coin flip", "sorting"]


def test_estimates_are_points_with_their_intervals():
    (axes,) = estimates_figure({"forgetting": ESTIMATES}, title="Forgetting").axes
    (container,) = axes.containers
    assert list(container.lines[0].get_xdata()) == [40, 5]
    (bars,) = container.lines[2]
    assert [sorted(segment[:, 0]) for segment in bars.get_segments()] == [pytest.approx([30, 50]),
                                                                          pytest.approx([-2, 12])]  # fmt: skip


def test_stability_curve_joins_a_methods_points():
    (axes,) = FIGURES["stability"]().axes
    assert list(axes.lines[0].get_xdata()) == [40, 80] and list(axes.lines[0].get_ydata()) == [90, 70]
    assert [text.get_text() for text in axes.texts] == ["10", "1000"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matrix_figure(MATRIX[:2], TASKS), "must have 4 rows of 3"),
        (lambda: matrix_figure({}, TASKS), "accuracies is empty"),
        (lambda: estimates_figure({}, title="x"), "estimates is empty"),
        (lambda: stability_figure({"EWC": {}}), "curves is empty"),
    ],
)
def test_nothing_to_draw_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
