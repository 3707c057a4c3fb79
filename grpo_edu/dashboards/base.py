"""What all dashboards share: controls above a picture with alternative text, and a page without widgets."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.figure_style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 96  # CSS has as many: one dot of the picture is one of the page
STYLE = {"description_width": "12em"}
WIDE = {"width": "38em", "max_width": "100%"}


class Dashboard(widgets.VBox):
    """A title, controls, a line of words and a picture. Subclasses call `show` and `say`.

    Its text is the same on every machine, so a notebook that shows it can be compared with a stored run.

    Args:
        title: the heading.
        controls: widgets, in the order in which the Tab key reaches them.
        about: one sentence on what to do.
    """

    def __init__(self, title: str, controls: Sequence[widgets.Widget], about: str) -> None:
        self.alt = ""
        self._places: dict[tuple, list] = {}
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self.controls = widgets.VBox(list(controls))
        head = widgets.HTML(f"<b>{html.escape(title)}</b><br>{html.escape(about)}")
        self._title = title
        super().__init__([head, self.controls, self.message, self.picture])
        self.add_class("grpo-edu-dashboard")

    def show(self, figure: Figure, alt: str) -> None:
        """Put a figure in the picture's place; `alt` says in words what it shows now."""
        self.alt = alt
        self.picture.value = self.image(figure, alt)

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Words beside the picture, read out by a screen reader as they change."""
        self.message.value = say_html(text, wrong=wrong)

    def image(self, figure: Figure, alt: str) -> str:
        """The figure as an <img>. Figures of one shape keep the places of their panels, found for the first one.

        To find them takes longer than to draw, and a slider asks for several pictures a second.
        """
        key = (*figure.get_size_inches(), *(axes.get_title(loc="left") for axes in figure.axes))
        if key in self._places:
            figure.set_layout_engine("none")
            for axes, place in zip(figure.axes, self._places[key], strict=True):
                axes.set_position(place)
        payload = base64.b64encode(_png(figure)).decode()
        self._places.setdefault(key, [axes.get_position() for axes in figure.axes])
        width = round(_DPI * figure.get_figwidth())
        style = f"width:{width}px;max-width:100%;height:auto"
        return f'<img alt="{html.escape(alt)}" style="{style}" src="data:image/png;base64,{payload}">'

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget, and the same view as a picture with a caption for where there are no widgets."""
        bundle = super()._repr_mimebundle_(**kwargs)
        names = [label for label in map(_label, _leaves(self.controls)) if label]
        caption = html.escape(f"{self._title}. {self.alt}".strip())
        controls = html.escape(f"Run the cell for its controls: {', '.join(names)}.")
        page = f"{self.message.value}{self.picture.value}<p><i>{caption}</i><br>{controls}</p>"
        return {**bundle, "text/html": page}


class Explorer(Dashboard):
    """A dashboard that draws anew whenever a control changes. Subclasses have `draw`, which returns figure and alt.

    A ValueError of `draw` is an impossible combination: it is explained beside the last picture.
    """

    def __init__(self, title: str, controls: Sequence[widgets.Widget], about: str) -> None:
        super().__init__(title, controls, about)
        for control in controls:
            control.observe(self._changed, "value")
        self.redraw()

    def draw(self) -> tuple[Figure, str]:
        """The figure for the controls as they stand, and its alternative text."""
        raise NotImplementedError

    def words(self) -> str:
        """What is said beside the picture."""
        return ""

    def redraw(self) -> None:
        """Draw, or say what is wrong."""
        try:
            figure, alt = self.draw()
        except ValueError as error:
            self.say(str(error), wrong=True)
            return
        self.show(figure, alt)
        self.say(self.words())

    def _changed(self, change: dict) -> None:
        self.redraw()


def _leaves(box: widgets.Box) -> Iterator[widgets.Widget]:
    """The controls in a box and in the boxes within it, in their order."""
    for child in box.children:
        yield from _leaves(child) if isinstance(child, widgets.Box) else (child,)


def _label(control: widgets.Widget) -> str:
    """What stands beside a control; "" for one that is hidden or has no words."""
    return "" if control.layout.display == "none" else getattr(control, "description", "")


def _png(figure: Figure) -> bytes:
    """The figure drawn once; `savefig` draws it twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    buffer = io.BytesIO()
    Image.frombuffer("RGBA", (width, height), canvas.buffer_rgba(), "raw", "RGBA", 0, 1).save(
        buffer, "png", compress_level=1
    )
    return buffer.getvalue()


def say_html(text: str, *, wrong: bool = False) -> str:
    """A line of words that follows the page's theme; what is wrong has a bar and a word before it, not color alone."""
    if not text:
        return ""
    look = f"border-left:4px solid {COLORS[1]};padding-left:8px;" if wrong else ""
    before = "Attention: " if wrong else ""
    return f'<div role="status" style="{look}line-height:1.5">{before}{html.escape(text)}</div>'


def slider(kind: type, label: str, value: Any, low: Any, high: Any, step: Any, tip: str, **options: Any) -> Any:
    """A labeled slider, reached by the Tab key and moved by the arrow keys."""
    return kind(value=value, min=low, max=high, step=step, description=label, tooltip=tip, style=STYLE,
                layout=widgets.Layout(**WIDE), **options)  # fmt: skip


def choice(label: str, options: Iterable[str | tuple[str, str]], tip: str, value: Any = None) -> widgets.Dropdown:
    """A labeled list of which one is chosen; the first where `value` is None."""
    chosen = {} if value is None else {"value": value}
    return widgets.Dropdown(options=list(options), description=label, tooltip=tip, style=STYLE,
                            layout=widgets.Layout(**WIDE), **chosen)  # fmt: skip
