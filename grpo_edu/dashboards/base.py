"""The common part of all dashboards: controls next to a picture with alternative text, and a view without widgets."""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from grpo_edu.dashboards.worker import Stopped, Worker, words_of
from grpo_edu.figures.hover import figure_values, with_values, without_values
from grpo_edu.figures.style import COLORS, image_tag
from grpo_edu.web import read_web

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI, _CSS_DPI = 192, 96  # two dots of the picture for each pixel of the page, so it is sharp on a dense screen


class Dashboard(widgets.VBox):
    """A title, and side by side the controls and what they show: a message and a picture.

    Subclasses call `show` and `say`, and `work` for what takes long. The text is the same on every computer, so the
    notebooks that show a dashboard can be compared with their stored outputs.

    Args:
        title: the heading.
        controls: widgets, in the order in which the Tab key reaches them.
        about: one sentence that says what to do.
    """

    worker: Worker | None = None  # the latest piece of long work

    def __init__(self, title: str, controls: Sequence[widgets.Widget], about: str) -> None:
        self.alt = ""
        self._places: dict[tuple, list] = {}
        self.message, self.picture = widgets.HTML(), widgets.HTML()
        self.message.add_class("grpo-edu-message")
        self.controls, self.stage = widgets.VBox(list(controls)), widgets.VBox([self.message, self.picture])
        script = html.escape(read_web("dashboard.js") + read_web("hover.js"))
        look = f'<style onload="{script}">{read_web("dashboard.css")}</style>'
        head = widgets.HTML(f"{look}<h2>{html.escape(title)}</h2>{html.escape(about)}")
        self._title = title
        columns = widgets.Box([self.controls, self.stage])
        super().__init__([head, columns])
        for part, name in (
            (self, "dashboard"),
            (columns, "columns"),
            (self.controls, "controls"),
            (self.stage, "stage"),
        ):
            part.add_class(f"grpo-edu-{name}")

    def show(self, figure: Figure, alt: str) -> None:
        """Show a figure; `alt` says in words what it shows now."""
        self.alt = alt
        self.picture.value = self.image(figure, alt)

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Show a message next to the picture; a screen reader reads it when it changes."""
        self.message.value = say_html(text, wrong=wrong)

    def work(self, task: Callable[[Worker], None]) -> None:
        """Begin a task in a thread of its own; `ended` is called at its end."""
        self.worker = Worker(task, self.ended)
        self.worker.start()

    @property
    def busy(self) -> bool:
        """True if the latest task has not ended."""
        return self.worker is not None and self.worker.running

    def ended(self, error: BaseException | None) -> None:
        """Finish a task: show its error, if there was one."""
        if error is not None and not isinstance(error, Stopped):
            self.say(words_of(error), wrong=True)

    def halt(self, button: object = None) -> None:
        """Ask the task to end."""
        if self.worker is not None:
            self.worker.stop()

    def close(self) -> None:
        """End the task with the widget."""
        self.halt()
        super().close()

    def image(self, figure: Figure, alt: str) -> str:
        """Return the figure as an <img>. Figures of the same shape reuse the panel positions of the first one.

        Computing the positions takes longer than drawing, and a slider asks for several pictures per second.
        """
        key = (*figure.get_size_inches(), *(axes.get_title(loc="left") for axes in figure.axes))
        if key in self._places:
            figure.set_layout_engine("none")
            for axes, place in zip(figure.axes, self._places[key], strict=True):
                axes.set_position(place)
        picture = _png(figure)
        self._places.setdefault(key, [axes.get_position() for axes in figure.axes])
        image = image_tag(picture, "png", alt, round(_CSS_DPI * figure.get_figwidth()))
        return with_values(image, figure_values(figure))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """Return the widget, and for pages without widgets the same view as a picture with a caption."""
        bundle = super()._repr_mimebundle_(**kwargs)
        names = [label for label in map(_label, _leaves(self.controls)) if label]
        caption = html.escape(f"{self._title}. {self.alt}".strip())
        controls = html.escape(f"Run the cell to use its controls: {', '.join(names)}.")
        page = f"{self.message.value}{self.static_view()}<p><i>{caption}</i><br>{controls}</p>"
        return {**bundle, "text/html": page}

    def static_view(self) -> str:
        """Return the picture as HTML that can be read without widgets, scripts and style sheets."""
        return without_values(self.picture.value)


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
        """Draw the figure for the current values of the controls, and its alternative text."""
        raise NotImplementedError

    def words(self) -> str:
        """Return the message next to the picture."""
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
    """Yield the controls in a box and in the boxes within it, in their order."""
    for child in box.children:
        yield from _leaves(child) if isinstance(child, widgets.Box) else (child,)


def _label(control: widgets.Widget) -> str:
    """Return the label of a control; "" for one that is hidden or has none."""
    return "" if control.layout.display == "none" else getattr(control, "description", "")


def _png(figure: Figure) -> bytes:
    """Return the figure as a PNG, drawn only once; `savefig` would draw it twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    figure.set_dpi(_DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    buffer = io.BytesIO()
    drawn = Image.frombuffer("RGBA", (width, height), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
    drawn.convert("RGB").save(buffer, "png", compress_level=1)
    return buffer.getvalue()


def say_html(text: str, *, wrong: bool = False) -> str:
    """Return a message in the page's theme; an error is marked by a bar and a word, not by color alone."""
    if not text:
        return ""
    look = f"border-left:4px solid {COLORS[1]};padding-left:8px;" if wrong else ""
    before = "Attention: " if wrong else ""
    return f'<div role="status" style="{look}line-height:1.5">{before}{marked_text(text)}</div>'


def marked_text(text: str) -> str:
    """Return a text as HTML, in which what stands in backticks is marked as code.

    >>> marked_text("lower `beta` < 1")
    'lower <code>beta</code> &lt; 1'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def progress_bar(stage: str, part: float, line: str) -> str:
    """Return a bar for the stage under way, from 0 to 1, and a line that says more."""
    bar = f'<progress aria-label="{html.escape(stage)}" max="100" value="{100 * part:.0f}"></progress>'
    return f"{bar}<div>{html.escape(line)}</div>"


@functools.cache
def _with_fixed_limits(kind: type) -> type:
    """Return a slider class of which a page can move the value only; its limits stay, and the kernel checks them."""

    def set_state(self: Any, sync_data: dict[str, Any]) -> None:
        kind.set_state(self, {name: value for name, value in sync_data.items() if name == "value"})  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"set_state": set_state})


def slider(kind: type, label: str, value: Any, low: Any, high: Any, step: Any, tip: str, **options: Any) -> Any:
    """Return a labeled slider, reached by the Tab key and moved by the arrow keys."""
    return _with_fixed_limits(kind)(
        value=value, min=low, max=high, step=step, description=label, tooltip=tip, **options
    )


def choice(label: str, options: Iterable[str | tuple[str, Any]], tip: str) -> widgets.Dropdown:
    """Return a labeled list to choose one item from."""
    return widgets.Dropdown(options=list(options), description=label, tooltip=tip)


def several(label: str, options: Sequence[str], value: Sequence[str], rows: int = 0) -> widgets.SelectMultiple:
    """Return a labeled list to choose several items from."""
    return widgets.SelectMultiple(
        options=options,
        value=value,
        description=label,
        rows=rows or min(6, len(options)),
        tooltip="several with Shift or Ctrl",
    )


def named_functions(rewards: Mapping[str, Callable]) -> dict[str, Callable]:
    """Return the reward functions that a dashboard offers, by name; raises ValueError for anything else."""
    if not isinstance(rewards, Mapping) or not all(map(callable, rewards.values())):
        raise ValueError(f"rewards must be a dictionary of functions, such as {{'mine': mine}}, got {rewards!r}")
    return dict(rewards)


def button_row(actions: dict[str, tuple[Callable, str]]) -> tuple[list[widgets.Button], widgets.Box]:
    """Buttons in a row that wraps: label → (what a click does, tooltip)."""
    buttons = []
    for label, (act, tip) in actions.items():
        button = widgets.Button(description=label, tooltip=tip)
        button.on_click(act)
        buttons.append(button)
    row = widgets.Box(buttons)
    row.add_class("grpo-edu-buttons")
    return buttons, row


def offer(
    row: Sequence[widgets.Button], possible: Sequence[widgets.Button], first: widgets.Button | None = None
) -> None:
    """Show which buttons of a row can do something now, and which of them is the next step.

    A button that can do nothing stays on, because one that is off loses the focus. It looks and is announced as off,
    and it says why when it is pressed.
    """
    for button in row:
        button.button_style = "primary" if button is first else ""
        (button.remove_class if button in possible else button.add_class)("grpo-edu-off")


def folded(controls: Sequence[widgets.Widget]) -> list[widgets.Widget]:
    """Return a button and the controls that it shows and hides, hidden at first."""
    button = widgets.ToggleButton(
        description="More settings ▸", tooltip="show or hide the settings that are seldom changed"
    )
    box = widgets.VBox(list(controls), layout=widgets.Layout(display="none"))

    def turn(change: dict) -> None:
        box.layout.display = None if change["new"] else "none"
        button.description = "Fewer settings ▾" if change["new"] else "More settings ▸"

    button.observe(turn, "value")
    return [button, box]
