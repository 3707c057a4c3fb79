"""Pictures of memory: what they draw, worked out by hand, and that every text can be read."""


import pytest
from matplotlib.colors import to_rgb
from pictures import assert_readable

from grpo_edu.figure_style import COLORS
from grpo_edu.figures_memory import accuracy_by_rate, memory_curve, peak_bars

CURVE = [(0.0, 100_000_000), (0.5, 300_000_000), (1.0, 200_000_000), (2.0, 250_000_000)]
STAGES = [(0.0, "loading"), (0.25, "rollout"), (1.0, "learning"), (1.5, "rollout")]
MEASURED = {"as it is": 1357e6, "logits in chunks": 782e6, "recomputed layers": 300e6}
ESTIMATED = {"as it is": 1500e6, "logits in chunks": 800e6, "recomputed layers": 280e6}
TUNING = {
    "GRPO, all weights": {1e-3: (20, 100), 1e-4: (90, 100)},
    "GRPO, LoRA": {1e-3: (85, 100), 1e-2: (0, 100)},
}
FIGURES = {
    "curve": lambda: memory_curve(CURVE, STAGES, libraries=50_000_000),
    "peaks": lambda: peak_bars(MEASURED, ESTIMATED),
    "rates": lambda: accuracy_by_rate(TUNING),
}


def xy(line):
    return [(float(x), float(y)) for x, y in line.get_xydata()]


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_memory_curve_leaves_the_libraries_out_and_marks_its_peak():
    axes = FIGURES["curve"]().axes[0]
    curve, peak = axes.lines
    assert xy(curve) == [(0, 50), (0.5, 250), (1, 150), (2, 200)]
    assert xy(peak) == [(0.5, 250)]


def test_each_stage_is_a_span_and_keeps_its_color_when_it_comes_again():
    axes = FIGURES["curve"]().axes[0]
    spans = [(float(span.get_x()), float(span.get_width())) for span in axes.patches]
    assert spans == [(0, 0.25), (0.25, 0.75), (1, 0.5), (1.5, 0.5)]
    colors = [span.get_facecolor()[:3] for span in axes.patches]
    assert colors == [to_rgb(COLORS[number]) for number in (0, 1, 2, 1)]
    assert axes.get_legend_handles_labels()[1] == ["loading", "rollout", "learning", "peak"]


def test_peak_bars_have_the_estimate_on_them():
    axes = FIGURES["peaks"]().axes[0]
    assert [float(bar.get_width()) for bar in axes.patches] == [1357, 782, 300]
    assert xy(axes.lines[0]) == [(1500, 0), (800, 1), (280, 2)]
    assert [text.get_text() for text in axes.texts] == ["1357", "782", "300"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*MEASURED]


def test_accuracy_by_rate_goes_from_small_to_large_rates_with_wilson_intervals():
    axes = FIGURES["rates"]().axes[0]
    first, second = (line for line in axes.lines if line.get_label() in TUNING)
    assert xy(first) == [(1e-4, 90), (1e-3, 20)]
    assert [float(x) for x in second.get_xdata()] == pytest.approx([1.04e-3, 1.04e-2])
    assert axes.get_xscale() == "log"
    segments = axes.collections[0].get_segments()
    assert [float(y) for y in segments[0][:, 1]] == pytest.approx([82.56, 94.48], abs=0.01)  # Wilson for 90 of 100


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: memory_curve([], STAGES), "curve and stages"),
        (lambda: memory_curve(CURVE, []), "curve and stages"),
        (lambda: peak_bars({}, {}), "same settings"),
        (lambda: peak_bars({"a": 1.0}, {"b": 1.0}), r"same settings, got \['a'\] and \['b'\]"),
        (lambda: accuracy_by_rate({}), "at least one method"),
        (lambda: accuracy_by_rate({"GRPO": {}}), "at least one learning rate"),
    ],
)
def test_figures_refuse(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
