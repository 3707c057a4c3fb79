"""The common part of all dashboards: controls above a picture with alternative text, and a view without widgets."""

from __future__ import annotations

import base64
import functools
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.figures.style import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 96  # as in CSS: one dot of the picture is one pixel of the page
STYLE = {"description_width": "12em"}
WIDE = {"width": "38em", "max_width": "100%"}


class Dashboard(widgets.VBox):
    """A title, controls, a message and a picture. Subclasses call `show` and `say`.

    Its text is the same on every computer, so the notebooks that show it can be compared with their stored outputs.

    Args:
        title: the heading.
        controls: widgets, in the order in which the Tab key reaches them.
        about: one sentence that says what to do.
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
        """Show a figure; `alt` says in words what it shows now."""
        self.alt = alt
        self.picture.value = self.image(figure, alt)

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Show a message next to the picture; a screen reader reads it when it changes."""
        self.message.value = say_html(text, wrong=wrong)

    def image(self, figure: Figure, alt: str) -> str:
        """The figure as an <img>. Figures of the same shape reuse the panel positions of the first one.

        Computing the positions takes longer than drawing, and a slider asks for several pictures per second.
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
        """The widget, and for pages without widgets the same view as a picture with a caption."""
        bundle = super()._repr_mimebundle_(**kwargs)
        names = [label for label in map(_label, _leaves(self.controls)) if label]
        caption = html.escape(f"{self._title}. {self.alt}".strip())
        controls = html.escape(f"Run the cell to use its controls: {', '.join(names)}.")
        page = f"{self.message.value}{self.picture.value}<p><i>{caption}</i><br>{controls}</p>"
        return {**bundle, "text/html": page}


class Explorer(Dashboard):
    """A dashboard that draws again whenever a control changes. Subclasses define `draw`, which returns figure and alt.

    A ValueError of `draw` means an impossible combination, and is shown next to the last picture.
    """

    def __init__(self, title: str, controls: Sequence[widgets.Widget], about: str) -> None:
        super().__init__(title, controls, about)
        for control in controls:
            control.observe(self._changed, "value")
        self.redraw()

    def draw(self) -> tuple[Figure, str]:
        """The figure for the current values of the controls, and its alternative text."""
        raise NotImplementedError

    def words(self) -> str:
        """The message next to the picture."""
        return ""

    def redraw(self) -> None:
        """Draw, or show what is wrong."""
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
    """The label of a control; "" for one that is hidden or has none."""
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
    """A message in the page's theme; an error is marked by a bar and a word, not by color alone."""
    if not text:
        return ""
    look = f"border-left:4px solid {COLORS[1]};padding-left:8px;" if wrong else ""
    before = "Attention: " if wrong else ""
    return f'<div role="status" style="{look}line-height:1.5">{before}{html.escape(text)}</div>'


@functools.cache
def _with_fixed_limits(kind: type) -> type:
    """A slider of which a page can move the value only: the limits are checked in the kernel, and stay as they are."""

    def set_state(self: Any, sync_data: dict[str, Any]) -> None:
        kind.set_state(self, {name: value for name, value in sync_data.items() if name == "value"})  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"set_state": set_state})


def slider(kind: type, label: str, value: Any, low: Any, high: Any, step: Any, tip: str, **options: Any) -> Any:
    """A labeled slider, reached by the Tab key and moved by the arrow keys."""
    return _with_fixed_limits(kind)(
        value=value,
        min=low,
        max=high,
        step=step,
        description=label,
        tooltip=tip,
        style=STYLE,
        layout=widgets.Layout(**WIDE),
        **options,
    )


def choice(label: str, options: Iterable[str | tuple[str, str]], tip: str, value: Any = None) -> widgets.Dropdown:
    """A labeled list to choose one item from; `value` None chooses the first."""
    chosen = {} if value is None else {"value": value}
    return widgets.Dropdown(
        options=list(options), description=label, tooltip=tip, style=STYLE, layout=widgets.Layout(**WIDE), **chosen
    )
