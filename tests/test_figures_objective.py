"""Pictures of the objective: what they draw, worked out by hand, and that every text can be read."""

import math

import pytest
import torch
from pictures import assert_readable

from grpo_edu.figures_objective import clip_curves, line_panels, similarity_map, token_push_maps, token_strip

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
PUSHES = {"grpo": torch.tensor([[0.2, 0.2, 0.0], [-0.1, 0.0, -0.4]]), "dapo": torch.zeros(2, 3)}
STOPPED = {"grpo": torch.tensor([[False, False, False], [False, True, False]])}
ROWS = ["right, short", "wrong, long"]
NAMES = ["GRPO", "BNPO", "Dr. GRPO"]
CURVES = {"Bias": {"k1": [0.0, 0.0, 0.0], "k3": [0.0, 0.1, 0.3]}, "Spread": {"k3": [1.0, 1.0, 2.0]}}
FIGURES = {
    "clip": clip_curves,
    "clip on two sides": lambda: clip_curves(epsilon_high=0.28, delta=1.6),
    "cispo": lambda: clip_curves(loss_type="cispo", epsilon_high=1.5),
    "lines": lambda: line_panels([1, 10, 100], CURVES, xlabel="KL", ylabels=["nats", "nats"], xscale="log"),
    "strip": lambda: token_strip(["position", "␣", "(end)"] * 7, [0.0, 0.5, 1.0] * 7, title="Probability"),
    "pushes": lambda: token_push_maps(PUSHES, MASK, row_labels=ROWS, stopped=STOPPED),
    "similarity": lambda: similarity_map(NAMES, torch.eye(3) - 0.5, title="Cosines"),
}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def points(line):
    return {round(float(x), 6): round(float(y), 6) for x, y in line.get_xydata()}


def drawn(axes):
    return {line.get_label(): points(line) for line in axes.lines if line.get_label()[0] != "_"}


@pytest.mark.parametrize("name", FIGURES)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(name):
    assert_readable(FIGURES[name]())


def test_clip_curves_by_hand():
    objective, push = map(drawn, clip_curves(epsilon=0.2).axes)
    assert objective["A = +1"][0.5] == 0.5 and objective["A = +1"][1.5] == 1.2
    assert objective["A = −1"][0.5] == -0.8 and objective["A = −1"][1.5] == -1.5
    # the push on log π is ρ·A inside, and 0 on one side only
    assert [push["A = +1"][ratio] for ratio in (0.5, 1.0, 1.5)] == [0.5, 1.0, 0.0]
    assert [push["A = −1"][ratio] for ratio in (0.5, 1.0, 1.5)] == [0.0, -1.0, -1.5]


def test_clip_curves_with_a_bound_on_the_ratio_and_another_upper_clip():
    _, push = map(drawn, clip_curves(epsilon=0.2, epsilon_high=0.28, delta=1.6).axes)
    assert push["A = +1"][1.25] == 1.25 and push["A = +1"][1.3] == 0
    assert push["A = −1"][1.5] == -1.5 and push["A = −1"][1.7] == 0


def test_clip_curves_of_cispo_cap_the_push_and_never_end_it():
    _, push = map(drawn, clip_curves(loss_type="cispo", epsilon_high=1.5).axes)
    assert [push["A = +1"][ratio] for ratio in (0.5, 1.5, 2.0)] == [0.5, 1.5, 1.5]
    assert push["A = −1"][2.0] == -1.5


def test_dotted_lines_stand_at_the_bounds():
    def bounds(**options):
        lines = clip_curves(**options).axes[0].lines
        return [round(line.get_xdata()[0], 6) for line in lines if line.get_linestyle() == ":"]

    assert bounds(epsilon=0.2) == [0.8, 1.2]
    assert bounds(epsilon=0.2, epsilon_high=0.28, delta=1.6) == [0.8, 1.28, 1.6]
    assert bounds(loss_type="cispo", epsilon_high=1.5) == [1.5]


def test_a_label_has_one_color_in_all_panels_and_the_legend_names_it_once():
    figure = FIGURES["lines"]()
    assert [drawn(axes) for axes in figure.axes] == [
        {"k1": {1: 0, 10: 0, 100: 0}, "k3": {1: 0, 10: 0.1, 100: 0.3}},
        {"k3": {1: 1, 10: 1, 100: 2}},
    ]
    looks = [(line.get_label(), line.get_color(), line.get_marker()) for axes in figure.axes for line in axes.lines]
    assert looks[1] == looks[2] and looks[0][1:] != looks[1][1:]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["k1", "k3"]
    assert all(axes.get_xscale() == "log" and axes.get_yscale() == "linear" for axes in figure.axes)


def test_one_line_a_panel_needs_no_legend_and_guides_are_drawn():
    figure = line_panels([1, 2], {"Loss": {"loss": [0.0, 1.0]}}, xlabel="step", ylabels=["nats"], guides=[0.5])
    assert not figure.legends
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0.0, 1.0], [0.5, 0.5]]


def test_token_strip_cuts_long_tokens_and_darkens_likely_ones():
    axes = token_strip(["positions", "2"], [0.25, 1.0], title="Probability").axes[0]
    assert texts(axes) == ["positio…", "0.25", "2", "1.00"]
    pale, dark = (sum(patch.get_facecolor()[:3]) for patch in axes.patches)
    assert pale > dark


def test_pushes_are_signed_stopped_ones_crossed_and_padding_empty():
    grpo, dapo = token_push_maps(PUSHES, MASK, row_labels=ROWS, stopped=STOPPED).axes
    assert texts(grpo) == [".20", ".20", "−.10", "×", "−.40"]
    assert texts(dapo) == [".00"] * 5
    up, _, down, none, hard = (patch.get_facecolor()[:3] for patch in grpo.patches)
    assert up[2] > up[0] and down[0] > down[2], "blue up, vermilion down"
    assert none == (1, 1, 1) and sum(hard) < sum(down)
    assert [label.get_text() for label in grpo.get_yticklabels()] == ROWS


def test_similarity_map_shows_every_pair():
    axes = similarity_map(["a", "b"], torch.tensor([[1.0, -0.25], [-0.25, 1.0]]), title="Cosines").axes[0]
    assert texts(axes) == ["1.00", "−0.25", "−0.25", "1.00"]
    assert axes.get_title(loc="left") == "Cosines"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: clip_curves(largest_ratio=1.0), "largest_ratio must be above 1"),
        (lambda: clip_curves(loss_type="ppo"), "loss_type must be one of"),
        (lambda: line_panels([1], {}, xlabel="x", ylabels=[]), "panels and ylabels"),
        (lambda: line_panels([1], {"a": {"b": [1.0, 2.0]}}, xlabel="x", ylabels=["y"]), "has 2 values for 1"),
        (lambda: token_strip([], [], title="x"), "tokens and values"),
        (lambda: token_strip(["a"], [1.5], title="x"), "between 0 and 1"),
        (lambda: token_strip(["a"], [math.nan], title="x"), "between 0 and 1"),
        (lambda: token_push_maps({}, MASK, row_labels=ROWS), "must match completion_mask"),
        (lambda: token_push_maps(PUSHES, MASK[:1], row_labels=ROWS), "must match completion_mask"),
        (lambda: similarity_map(NAMES, torch.eye(2), title="x"), r"similarity must be \(3, 3\)"),
    ],
)
def test_figures_refuse(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
