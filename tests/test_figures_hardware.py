"""Pictures of the machine: what they draw, worked out by hand, and that every text can be read."""


import pytest
from pictures import assert_readable

from grpo_edu.figures_hardware import format_bars, stacked_bars, thread_curves

PARTS = {
    "tiny": {"weights": 1.0, "gradients": 1.0, "cache": 0.5},
    "Qwen2-0.5B": {"weights": 20.0, "gradients": 20.0, "optimizer": 40.0, "activations": 90.0, "logits": 5.0},
}
FIGURES = {
    "threads": lambda: thread_curves(
        [1, 2, 4], {"large": [4.0, 2.0, 2.5], "small": [1.0, 1.0, 2.0], "step": [3.0, 2.0, 2.0]}, cores=2
    ),
    "formats": lambda: format_bars(
        {"256 rows": {"fp32": 8.0, "bf16": 2.0, "int8": 16.0}, "1 row": {"fp32": 1.0, "bf16": 0.5, "int8": 0.5}}
    ),
    "parts": lambda: stacked_bars(PARTS, title="Memory", unit="GiB"),
}


def xy(line):
    return [(float(x), float(y)) for x, y in line.get_xydata()]


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_thread_curves_are_multiples_of_one_thread_under_an_ideal_that_ends_at_the_cores():
    axes = FIGURES["threads"]().axes[0]
    lines = {line.get_label(): xy(line) for line in axes.lines}
    assert lines["large"] == [(0, 1), (1, 2), (2, 1.6)]
    assert lines["small"] == [(0, 1), (1, 1), (2, 0.5)]
    assert lines["ideal"] == [(0, 1), (1, 2), (2, 2)]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4"]


def test_format_bars_are_multiples_of_the_first_format():
    axes = FIGURES["formats"]().axes[0]
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert widths == {"fp32": [1, 1], "bf16": [4, 2], "int8": [0.5, 2]}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["256 rows", "1 row"]


def test_stacked_bars_put_the_parts_end_to_end_and_tell_the_sum():
    axes = FIGURES["parts"]().axes[0]
    ends = {bars.get_label(): [(bar.get_x(), bar.get_width()) for bar in bars] for bars in axes.containers}
    assert ends == {
        "weights": [(0, 1), (0, 20)],
        "gradients": [(1, 1), (20, 20)],
        "cache": [(2, 0.5), (40, 0)],
        "optimizer": [(2.5, 0), (40, 40)],
        "activations": [(2.5, 0), (80, 90)],
        "logits": [(2.5, 0), (170, 5)],
    }
    assert [text.get_text() for text in axes.texts] == ["2.5", "175"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: thread_curves([2, 4], {"a": [1.0, 1.0]}, cores=4), r"threads must start at 1.*got \[2, 4\]"),
        (lambda: thread_curves([1, 2], {"a": [1.0]}, cores=2), r"seconds\['a'\] must have 2 times"),
        (lambda: format_bars({}), "seconds must have the same formats"),
        (lambda: format_bars({"a": {"fp32": 1.0}, "b": {"int8": 1.0}}), "seconds must have the same formats"),
        (lambda: stacked_bars({}, title="t", unit="s"), "at least one size"),
        (lambda: stacked_bars({"a": {"b": -1.0}}, title="t", unit="s"), "none below 0"),
    ],
)
def test_figures_refuse(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
