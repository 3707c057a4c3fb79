"""Pictures of a training run (its curves, accuracy before and after), and any figure as an HTML image."""

import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_edu.figures.style import (
    draw_curve,
    headline,
    image_tag,
    intervals,
    legend_above_data,
    legend_below,
    name_rows,
    note,
    panel_grid,
    percent,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from grpo_edu.evaluation import Evaluation

# (key, title, label of the y axis, range of y or None)
PANELS = (
    ("reward", "Reward", "mean per completion", None),
    ("completions/mean_length", "Completion length", "tokens", None),
    ("frac_reward_zero_std", "Groups without a signal", "share of all-equal groups", (0, 1)),
    ("entropy", "Entropy", "nats per token", None),
    ("kl", "KL from the reference", "nats per token", None),
)


def training_curves(
    history: Sequence[Mapping[str, Any]], *, window: int = 5, metrics: Sequence[str] | None = None, title: str = ""
) -> "Figure":
    """Draw the curves of a run over its steps: reward and its parts, completion length, tied groups, entropy, KL.

    The thin line is what was measured, and the thick line is the mean of the last `window` steps. A panel whose metric
    is missing from the history is left out, and so is a part of the reward that equals the whole. None and NaN leave a
    gap.

    Args:
        history: one dict of metrics per step, as `train` yields them or `read_log` reads them; "step" is the x axis
            (1, 2, … if it is missing).
        window: steps in the moving mean, at least 1.
        metrics: keys of the panels to draw, such as "reward"; None draws all that the history has.
        title: title of the whole figure, above its panels.

    Raises ValueError: an empty history, one without any of the metrics, or window < 1.

    >>> figure = training_curves([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7}])
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['Reward']
    """
    if not history:
        raise ValueError("history is empty: train for at least one step before you draw it")
    steps = [record.get("step", number) for number, record in enumerate(history, start=1)]
    chosen = [panel for panel in PANELS if metrics is None or panel[0] in metrics]
    panels = [panel for panel in chosen if any(panel[0] in record for record in history)]
    if not panels:
        known = ", ".join(panel[0] for panel in chosen or PANELS)
        raise ValueError(f"history has none of the metrics that can be drawn; it needs at least one of {known}")
    figure, grid = panel_grid(len(panels))
    for axes, (key, name, unit, limits) in zip(grid, panels, strict=True):
        style_axes(axes, name, unit, "step")
        series = {key: column(history, key)} | (reward_parts(history) if key == "reward" else {})
        for number, (name, values) in enumerate(series.items()):
            label = part_name(name).removesuffix("_reward") if number else "total"
            draw_curve(axes, steps, values, window, number, label)
        if limits:
            axes.set_ylim(limits[0] - 0.04, limits[1] + 0.04)
        if len(series) > 1:
            legend_above_data(axes, columns=4 if len(panels) % 2 else 2)
        if len(steps) == 1:
            axes.set_xlim(steps[0] - 1, steps[0] + 1)
    if title:
        headline(figure, title)
    return figure


def overlaid_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> "Figure":
    """Draw the reward of several runs over their steps, thin as it was measured and thick as the mean of five steps.

    histories: name of a run → one dict of metrics per step.

    >>> figure = overlaid_curves({"a": [{"reward": 0.5}, {"reward": 0.7}], "b": [{"reward": 0.1}]})
    >>> figure.axes[0].get_legend_handles_labels()[1]
    ['a', 'b']
    """
    figure, (axes,) = panel_grid(1)
    style_axes(axes, PANELS[0][1], PANELS[0][2], "step")
    for number, (name, history) in enumerate(histories.items()):
        steps = [record.get("step", row) for row, record in enumerate(history, start=1)]
        draw_curve(axes, steps, column(history, "reward"), 5, number, name)
    legend_above_data(axes, columns=2)
    return figure


def accuracy_comparison(before: "Evaluation", after: "Evaluation", *, title: str = "Held-out accuracy") -> "Figure":
    """Draw the accuracy per level and in total, before and after, each as a dot in its 95% Wilson interval.

    Args:
        before, after: two evaluations. A level that occurs in only one of them gets one dot.
        title: the figure's title.

    >>> from grpo_edu.evaluation import Evaluation
    >>> first = Evaluation(["1 + 1?"], ["basic"], ["#### 3"], ["3"], [False])
    >>> then = Evaluation(["1 + 1?"], ["basic"], ["#### 2"], ["2"], [True])
    >>> accuracy_comparison(first, then).axes[0].get_xlabel()
    'problems solved (%), with 95% intervals'
    """
    tables = [_table(before), _table(after)]
    rows = list(dict.fromkeys([*tables[0], *tables[1]]))
    rows.sort(key=lambda row: row == "all")  # the total comes last, the levels keep their order
    figure, (axes,) = panel_grid(1, height=1.2 + 0.55 * len(rows))
    style_axes(axes, "", "", "problems solved (%), with 95% intervals")
    for number, (table, label) in enumerate(zip(tables, ("before", "after"), strict=True)):
        for row, name in enumerate(rows):
            if name in table:
                # the legend takes its entry from the first dot alone
                first = name == next(iter(table))
                _dot(axes, table[name], row + (0.17 if number else -0.17), number, label if first else None)
    name_rows(axes, [name.replace("_", " ") for name in rows])
    axes.set_xlim(-2, 112)  # space for the number next to an interval that ends at 100
    axes.set_xticks(range(0, 101, 20))
    legend_below(axes)
    headline(figure, title)
    return figure


class HTMLImage:
    """A figure as an HTML <img> with alternative text; printed as text it is that alternative text."""

    def __init__(self, markup: str, alt: str) -> None:
        self.html = markup
        self.alt = alt

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"<image: {self.alt}>"


def html_image(figure: "Figure", alt: str = "") -> HTMLImage:
    """Return the figure as `<img alt=… src="data:image/png;base64,…">`, which JupyterLab and a screen reader both show.

    JupyterLab ignores the alt of an `IPython.display.Image`. nbval compares HTML, so the notebooks are tested with
    `--nbval-sanitize-with tests/nbval_sanitize.cfg`, which ignores the picture's bytes and what follows the sign ≈ in
    its alt text.

    Args:
        figure: any Figure.
        alt: what the picture shows, in words; by default what `describe` says.

    >>> from matplotlib.figure import Figure
    >>> html_image(Figure(figsize=(1, 1)), "An empty square")
    <image: An empty square>
    """
    from PIL import Image

    alt = alt.strip() or describe(figure)
    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=192)  # twice the pixels of CSS, for screens of high density
    # A palette of 256 colors: a third of the bytes, and no difference to the eye.
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    width = round(96 * figure.get_figwidth())  # CSS has 96 px per inch
    return HTMLImage(image_tag(buffer.getvalue(), "png", alt, width), alt)


def describe(figure: "Figure") -> str:
    """Return a figure in words: its title, and each panel's title, axes and series; at the end values, after ≈.

    >>> describe(training_curves([{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.7}], title="It rises"))
    'It rises. Reward: mean per completion against step (total). Values: ≈ total from 0.5 to 0.6'
    """
    parts, values = [figure.get_suptitle()], []
    for axes in figure.axes:
        series = dict.fromkeys(map(str, axes.get_legend_handles_labels()[1]))
        ticks = [label.get_text() for label in (*axes.get_xticklabels(), *axes.get_yticklabels())]
        rows = dict.fromkeys(tick for tick in ticks if re.search(r"[^\W\d_]", tick) and "$" not in tick)
        texts = [" ".join(text.get_text().split()) for text in axes.texts if text.get_visible() and text.get_text()]
        axis = " against ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
        said = ": ".join(filter(None, (axes.get_title(loc="left"), axis))) or ", ".join(texts)
        listed = "; ".join(", ".join(names) for names in (series, rows) if names)
        parts.append(f"{said} ({listed})" if listed else said)
        found = [
            _marks(axes, line) or f"{line.get_label()} {_course(line)}"
            for line in axes.lines
            if str(line.get_label()) in series
        ]
        found += [text for text in texts if re.search(r"\d", text) and len(texts) <= 16] or _dots(axes, series)
        if found:
            title = f"{axes.get_title(loc='left')}: " if len(figure.axes) > 1 else ""
            values.append(title + ", ".join(found))
    said = " ".join(". ".join(dict.fromkeys(part for part in parts if part)).split()) or "A drawing"
    return f"{said}. Values: ≈ {' '.join('; '.join(values).split())}" if values else f"{said}."


def _row_names(axes: "Axes") -> list[str]:
    """Return the labels of the ticks at the left, which name rows; [] if they are numbers."""
    rows = [label.get_text() for label in axes.get_yticklabels()]
    return rows if any(re.search(r"[^\W\d_]", row) for row in rows) else []


def _dots(axes: "Axes", series: Collection[str]) -> list[str]:
    """Return the measured values of named rows: ["before: seed 0 44, seed 1 42; after: seed 0 90, seed 1 88"]."""
    rows = _row_names(axes)
    found = []
    for dots in axes.containers:
        if getattr(dots, "has_xerr", False) and rows:
            x, y = dots.lines[0].get_data()
            values = ", ".join(f"{rows[round(height)]} {value:.3g}" for value, height in zip(x, y, strict=True))
            found.append(f"{dots.get_label()}: {values}" if dots.get_label() in series else values)
    return ["; ".join(found)] if found else []


def _marks(axes: "Axes", line: "Line2D") -> str:
    """Return what the marks in a named row, or a vertical line across all of them, show; "" for a curve."""
    rows = _row_names(axes)
    x, y = line.get_data()
    if not rows:
        return ""
    if line.get_linestyle() == "None":
        return f"{rows[round(y[0])]}: {line.get_label()} {min(x):.3g} to {max(x):.3g}"
    return f"{line.get_label()} {x[0]:.3g}" if len(set(x)) == 1 else ""


def _course(line: "Line2D") -> str:
    """Where a curve begins and ends, and its lowest and highest value where that is in between."""
    values = [float(value) for value in line.get_ydata() if math.isfinite(value)]
    if not values:
        return "no values"
    first, last, low, high = values[0], values[-1], min(values), max(values)
    margin = (high - low) / 10
    said = f"from {first:.3g} to {last:.3g}"
    said += f", lowest {low:.3g}" if low < min(first, last) - margin else ""
    return said + (f", highest {high:.3g}" if high > max(first, last) + margin else "")


def _dot(axes: "Axes", row: Mapping[str, float], height: float, number: int, label: str | None) -> None:
    share, low, high = percent(row["accuracy"], row["low"], row["high"])
    intervals(axes, number, [(share, low, high)], [height], label=label)
    note(axes, f"{share:.0f}%" if share in (0, 100) else f"{share:.1f}%", (high, height))


def _table(evaluation: "Evaluation") -> dict[str, dict[str, float]]:
    """Return level → accuracy and interval, then "all" if there is more than one level."""
    summary = evaluation.to_dict()
    levels = dict(summary["per_level"])
    return levels if len(levels) == 1 else {**levels, "all": summary}


def column(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return one metric over the steps; NaN if a step does not have it.

    >>> column([{"kl": 0.5}, {"kl": None}, {}], "kl")
    [0.5, nan, nan]
    """
    values = [record.get(key) for record in history]
    return [math.nan if value is None else float(value) for value in values]


def reward_parts(history: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the mean of each reward function over the steps, left out if it equals the total reward.

    >>> reward_parts([{"reward": 1.5, "rewards/format_reward/mean": 0.5}])
    {'rewards/format_reward/mean': [0.5]}
    """
    names = dict.fromkeys(key for record in history for key in record if part_name(key) != key)
    total = column(history, "reward")
    parts = {name: column(history, name) for name in names}
    return {
        name: part
        for name, part in parts.items()
        if not all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(part, total, strict=True) if math.isfinite(a))
    }


def part_name(key: str) -> str:
    """Return the name of the reward function whose mean a key stands for; any other key as it is.

    >>> part_name("rewards/accuracy_reward/mean"), part_name("kl")
    ('accuracy_reward', 'kl')
    """
    if key.startswith("rewards/") and key.endswith("/mean"):
        return key.removeprefix("rewards/").removesuffix("/mean")
    return key
