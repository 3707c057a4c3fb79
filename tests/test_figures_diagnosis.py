"""Pictures of the diagnosis lab: what is drawn where, and what is refused."""

import pytest
from pictures import assert_readable

from grpo_edu.figure_style import COLORS
from grpo_edu.figures import html_image
from grpo_edu.figures_diagnosis import HEALTHY, SICK, SIGNS, outcomes, treatments, vital_signs

SICK_RUNS = [{"reward": [0.0, 0.1, 0.2], "kl": [0.0, 1.0, 5.0]}, {"reward": [0.2, 0.3, 0.4], "kl": [0.0, 2.0, 7.0]}]
SOUND_RUNS = [{"reward": [0.4, 0.6, 0.8]}, {"reward": [0.5, 0.7, 0.9]}]


def lines(axes, color):
    return [list(line.get_ydata()) for line in axes.get_lines() if line.get_color() == COLORS[color]]


def test_vital_signs_has_a_column_a_patient_and_a_row_a_sign():
    figure = vital_signs({"A": (SICK_RUNS, SOUND_RUNS), "B": (SICK_RUNS, [])}, ["reward", "kl"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["A", "B", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == [SIGNS["reward"], "", SIGNS["kl"], ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "step", "step"]


def test_vital_signs_draws_each_seed_their_mean_and_the_healthy_range():
    reward, kl = vital_signs({"A": (SICK_RUNS, SOUND_RUNS)}, ["reward", "kl"]).axes
    *seeds, mean = lines(reward, SICK)
    assert seeds == [[0.0, 0.1, 0.2], [0.2, 0.3, 0.4]]
    assert mean == pytest.approx([0.1, 0.2, 0.3])
    assert lines(reward, HEALTHY) == [pytest.approx([0.45, 0.65, 0.85])]
    (band,) = reward.collections
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices}
    assert {(1, 0.4), (1, 0.5), (3, 0.8), (3, 0.9)} <= corners
    assert lines(kl, HEALTHY) == [] and not kl.collections, "the healthy runs have no KL"


def test_a_run_that_ended_early_shortens_the_mean_only():
    short = [{"reward": [0.0, 0.1]}, {"reward": [0.2, 0.3, 0.4]}]
    (axes,) = vital_signs({"A": (short, [])}, ["reward"]).axes
    assert lines(axes, SICK) == [[0.0, 0.1], [0.2, 0.3, 0.4], pytest.approx([0.1, 0.2])]


def test_treatments_puts_the_mended_steps_after_the_broken_ones():
    first, second = treatments({"A": ([0.0, 0.1], [0.5]), "B": ([1.0], [0.4, 0.6])}).axes
    sick, mended = (line for line in first.get_lines() if line.get_color() in COLORS)
    assert (list(sick.get_xdata()), list(mended.get_xdata())) == ([1, 2], [3])
    low, high = second.get_ylim()
    assert low < 0 and high > 1, "every value of every panel is in sight"


def test_outcomes_shows_percent_a_mark_a_seed_and_the_mean():
    (axes,) = outcomes({"lr": ([0.0, 0.2], [0.8, 0.9]), "kl": ([0.5], [0.6])}, base=(0.4, 0.3, 0.5)).axes
    marks = [list(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "None"]
    assert marks == [[0, 20], [80, 90], [50], [60]]
    means = [line.get_xdata()[0] for line in axes.get_lines() if line.get_linewidth() == 2.5]
    assert means == pytest.approx([10, 85, 50, 60])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lr", "kl"]


@pytest.mark.parametrize(
    "figure",
    [
        lambda: vital_signs({"A": (SICK_RUNS, SOUND_RUNS), "B": (SICK_RUNS, [])}, ["reward", "kl"]),
        lambda: treatments({"A": ([0.0, 0.1], [0.5]), "B": ([1.0], [0.4, 0.6])}),
        lambda: outcomes({"lr": ([0.0, 0.2], [0.8, 0.9]), "kl": ([0.5], [0.6])}, base=(0.4, 0.3, 0.5)),
    ],
    ids=["signs", "treatments", "outcomes"],
)
def test_every_text_lies_inside_the_picture_and_overlaps_no_other(figure):
    assert_readable(figure())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: vital_signs({}), "patients is empty"),
        (lambda: vital_signs({"A": (SICK_RUNS, SOUND_RUNS)}, ["pulse"]), "signs: pulse unknown"),
        (lambda: treatments({}), "patients is empty"),
        (lambda: treatments({"A": ([0.0], [1.0])}, sign="pulse"), "sign: 'pulse' unknown"),
        (lambda: outcomes({}, base=(0.4, 0.3, 0.5)), "cases is empty"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_they_render():
    for figure in (
        vital_signs({"A": (SICK_RUNS, SOUND_RUNS)}, ["reward"]),
        treatments({"A": ([0.0], [1.0])}),
        outcomes({"lr": ([0.0], [0.8])}, base=(0.4, 0.3, 0.5)),
    ):
        assert "data:image/png;base64," in html_image(figure, "A picture of patients")._repr_html_()
