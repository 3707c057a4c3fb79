"""The decision tree: every fault of the lab is in it, and every text stays in its box."""

import pytest
from matplotlib.patches import FancyBboxPatch

from grpo_edu.broken_runs import CASES
from grpo_edu.figures_decision_tree import TREE, decision_tree

# Where each case is found in the tree.
PLACES = {
    "reward always 0": "the reward cannot read them",
    "chat template skipped": "lacks its chat template",
    "length truncation": "too little room",
    "tied rewards": "it pays for anything",
    "G too small": "G is too small",
    "std float trap": "float trap",
    "groups mixed": "groups mixed",
    "mask off by one": "mask off by one",
    "EOS masked": "EOS counts as padding",
    "lr too high": "learning rate too high",
    "stale old log-probabilities": "old log-probabilities are stale",
    "KL wrong sign": "its sign is wrong",
}


def test_every_case_has_a_place_and_every_place_a_case():
    faults = [fault for _, _, faults in TREE for fault in faults]
    assert {case.name for case in CASES} == set(PLACES)
    for place in PLACES.values():
        assert sum(place in fault for fault in faults) == 1, place
    assert len(faults) == len(PLACES)


@pytest.fixture(scope="module")
def drawn():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = decision_tree()
    FigureCanvasAgg(figure).draw()
    return figure, figure.axes[0]


def test_every_text_stays_in_its_box(drawn):
    figure, axes = drawn
    boxes = [patch.get_window_extent() for patch in axes.patches if isinstance(patch, FancyBboxPatch)]
    words = [text for text in axes.texts if text.get_text() not in ("", "yes", "no")]
    assert len(boxes) == 2 * len(TREE)
    for text in words:
        extent = text.get_window_extent()
        inside = [box for box in boxes if box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 <= box.y1]
        assert len(inside) == 1, text.get_text()


def test_questions_are_linked_by_no_and_answered_by_yes(drawn):
    words = [text.get_text() for text in drawn[1].texts]
    assert words.count("yes") == len(TREE) and words.count("no") == len(TREE) - 1
