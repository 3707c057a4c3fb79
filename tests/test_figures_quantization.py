"""The pictures of quantization show the numbers they are given, and refuse what does not fit."""

import pytest
from pictures import assert_readable

from grpo_edu.figures_quantization import (
    byte_bars,
    error_curves,
    interval_table,
    logp_scatter,
    number_lines,
    row_ranges,
    speed_bars,
)

CHANGES = [
    {"model": model, "scheme": scheme, "difference": 0.01 * n, "low": 0.01 * n - 0.02, "high": 0.01 * n + 0.02}
    for n, (model, scheme) in enumerate([("a", "bf16"), ("a", "int8"), ("b", "bf16"), ("b", "int8")])
]
FIGURES = {
    "lines": lambda: number_lines([0.2, -0.7], {"coarse": [-1.0, 0.0, 1.0], "fine": [-1.0, -0.5, 0.0, 0.5, 1.0]}),
    "errors": lambda: error_curves([2, 4, 8], {"one": [0.5, 0.1, 0.01], "rows": [0.4, 0.08, 0.005]}, title="Errors"),
    "rows": lambda: row_ranges([0.1 * n for n in range(1, 40)], title="Rows"),
    "bytes": lambda: byte_bars({"f": {"x": 4.0, "y": 8.0}, "q": {"x": 1.0, "y": 2.0}}, unit="MB", title="Bytes"),
    "logps": lambda: logp_scatter([-1.0, -2.0], {"bf16": [-1.0, -2.1], "int8": [-1.1, -2.0], "int4": [-1.5, -2.5]}),
    "intervals": lambda: interval_table(CHANGES, margin=0.03, title="Accuracy"),
    "speeds": lambda: speed_bars({"1 row": {"a": 1.0, "b": 4.0}, "8 rows": {"a": 2.0, "b": 3.0}}, title="Speed"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_each_number_goes_to_the_nearest_place():
    axes = FIGURES["lines"]().axes
    falls = [[line.get_xdata()[1] for line in panel.lines if len(line.get_xdata()) == 2 and line.get_ydata()[0] == 1]
             for panel in axes]  # fmt: skip
    assert falls == [[0.0, -1.0], [0.0, -0.5]]


def test_bars_add_up_and_are_compared_with_the_first():
    (axes,) = FIGURES["bytes"]().axes
    assert [text.get_text() for text in axes.texts] == ["12 MB", "3 MB, 4.0× smaller"]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 4), (0, 1), (4, 8), (1, 2)]


def test_intervals_are_in_points_around_their_changes():
    (axes,) = FIGURES["intervals"]().axes
    bars = [path for container in axes.containers for path in container.lines[2][0].get_segments()]
    ends = sorted((round(segment[0][0], 6), round(segment[1][0], 6)) for segment in bars)
    assert ends == [(-2.0, 2.0), (-1.0, 3.0), (0.0, 4.0), (1.0, 5.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]


def test_what_does_not_fit_is_refused():
    for call, message in {
        lambda: number_lines([], {"a": [0.0]}): "at least one number",
        lambda: number_lines([1.0], {"a": []}): "at least one place",
        lambda: error_curves([2, 4], {"a": [0.1]}, title=""): "2 numbers",
        lambda: byte_bars({"a": {"x": 1.0}, "b": {"y": 1.0}}, unit="", title=""): "the same parts",
        lambda: logp_scatter([0.0], {"a": [0.0, 1.0]}): "1 log-probabilities",
        lambda: interval_table([], margin=0.1, title=""): "at least one change",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
