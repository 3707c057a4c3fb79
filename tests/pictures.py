"""What every picture of the course must be: of a cell's width, on paper, its texts inside, apart and large enough."""

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from grpo_edu.figures.style import PAPER, WIDE, WIDTH

EDGE = 3  # dots between a text and the edge, of 100 per inch


def texts(figure: Figure) -> list[Text]:
    """The texts that are drawn; tick labels outside the limits of their axis exist, but are not."""
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low - 1e-9 <= tick.get_loc() <= high + 1e-9:
                    hidden |= {tick.label1, tick.label2}
    return [text for text in shown if text not in hidden and text.get_window_extent().width]


def assert_readable(figure: Figure) -> None:
    """AssertionError that names the text that cannot be read."""
    assert figure.get_figwidth() in (WIDTH, WIDE) and figure.get_facecolor() == to_rgba(PAPER)
    found = texts(figure)
    assert found, "a picture without a word"
    boxes = [text.get_window_extent() for text in found]
    for text, box in zip(found, boxes, strict=True):
        assert text.get_fontsize() >= 9, text
        assert figure.bbox.x0 + EDGE <= box.x0 and box.x1 <= figure.bbox.x1 - EDGE, text
        assert figure.bbox.y0 + EDGE <= box.y0 and box.y1 <= figure.bbox.y1 - EDGE, text
        over = [other for other, place in zip(found, boxes, strict=True) if other is not text and box.overlaps(place)]
        assert not over, (text, over)
