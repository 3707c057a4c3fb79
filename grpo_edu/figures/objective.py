"""Pictures of the objective: the clip and its gradient, the weight of each token, and curves over one variable."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import COLORS, GRID, INK, OPEN_LEGEND, PAPER, SMALL, look, panel_grid, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

_STRIP_COLUMNS, _STRIP_LETTERS = 10, 8  # tokens a line, letters of a token that fit into its cell
_UP, _DOWN = COLORS[0], COLORS[1]  # blue pushes up, vermilion pushes down


def clip_curves(*, epsilon: float = 0.2, epsilon_high: float | None = None, loss_type: str = "grpo") -> "Figure":
    r"""Draw one token's objective and its push on log π, against the ratio, for the advantages +1 and −1.

    .. math:: -\ell(\rho) \qquad\text{and}\qquad -\frac{\partial \ell}{\partial \log \pi}

    The values and the gradients are those of `grpo_edu.losses.per_token_policy_loss`, at ratios from 0 to 2.
    CISPO's loss depends on log π itself, whose curve takes π_old = 1.

    epsilon, epsilon_high, loss_type: as for `per_token_policy_loss`, which also says what raises ValueError.

    >>> [axes.get_title(loc="left") for axes in clip_curves().axes]
    ['Objective of a token', 'Push on its log-probability']
    """
    import torch

    from grpo_edu.losses import per_token_policy_loss

    points = torch.linspace(0.005, 2, 400, dtype=torch.float64)
    figure, (objective, push) = panel_grid(2)
    style_axes(objective, "Objective of a token", "−loss", "ratio ρ")
    style_axes(push, "Push on its log-probability", "−gradient of the loss", "ratio ρ")
    for number, (advantage, label) in enumerate(((1.0, "A = +1"), (-1.0, "A = −1"))):
        logps = points.log()[None].requires_grad_()
        advantages = torch.tensor([advantage], dtype=torch.float64)
        loss = per_token_policy_loss(
            logps, logps.exp(), advantages, epsilon=epsilon, epsilon_high=epsilon_high, loss_type=loss_type
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logps)
        for axes, values in ((objective, -loss), (push, -gradient)):
            drawn = values[0].detach().tolist()
            axes.plot(points.tolist(), drawn, **look(number), linewidth=1.8, markevery=(20, 40), label=label)
    for axes in (objective, push):
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xlim(0, 2)
    for bound in _bounds(epsilon, epsilon_high, loss_type):
        for axes in (objective, push):
            axes.axvline(bound, color=INK, linewidth=0.8, linestyle=":")
    figure.legend(*objective.get_legend_handles_labels(), loc="outside upper right", ncols=2, **OPEN_LEGEND)
    return figure


def line_panels(
    x: Sequence[float],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    xlabel: str,
    ylabels: Sequence[str],
    xscale: str = "linear",
    yscale: str = "linear",
    guides: Sequence[float] = (),
) -> "Figure":
    """Several quantities against one variable: one panel per title, one line per label.

    Args:
        x: the variable, in the unit that ``xlabel`` names.
        panels: title → label → values, each as long as x, in the unit that the panel's ylabel names.
        xlabel: the variable and its unit.
        ylabels: one per panel.
        xscale, yscale: "linear" or "log".
        guides: heights at which every panel has a dotted line.

    >>> figure = line_panels([0, 1], {"Loss": {"loss": [0.0, 1.0]}}, xlabel="step", ylabels=["nats"])
    >>> figure.axes[0].get_ylabel()
    'nats'
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure, grid = panel_grid(len(panels))
    for axes, (title, lines), ylabel in zip(grid, panels.items(), ylabels, strict=True):
        style_axes(axes, title, ylabel, xlabel)
        for place, (label, values) in enumerate(lines.items()):
            every = max(1, len(x) // 10)
            staggered = (place % every, every)  # so that equal lines show as such
            axes.plot(x, values, **look(labels.index(label)), linewidth=1.8, markevery=staggered, label=label)
        for height in guides:
            axes.axhline(height, color=INK, linewidth=0.8, linestyle=":")
        if xscale != "linear":
            axes.set_xscale(xscale)
            if len(x) <= 10:  # each value has a tick
                axes.set_xticks(x, [f"{value:g}" for value in x])
                axes.minorticks_off()
        if yscale != "linear":
            axes.set_yscale(yscale)
    if any(len(lines) > 1 for lines in panels.values()):
        drawn = {line.get_label(): line for axes in grid for line in axes.lines}
        handles = [drawn[label] for label in labels]
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), **OPEN_LEGEND)
    return figure


def token_strip(tokens: Sequence[str], values: Sequence[float], *, title: str) -> "Figure":
    """Draw a completion's tokens in reading order, each a cell with its value: the darker, the larger.

    Args:
        tokens: their texts; what is longer than a cell is cut.
        values: one per token, from 0 to 1, without unit (probabilities, or shares of a weight).
        title: what the values are.

    >>> figure = token_strip(["4", "2", "end"], [0.9, 0.5, 1.0], title="Probability")
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['4', '0.90']
    """
    lines = -(-len(tokens) // _STRIP_COLUMNS)
    figure, (axes,) = panel_grid(1, height=0.5 + 0.55 * lines)
    style_axes(axes, title, "", "")
    for place, (token, value) in enumerate(zip(tokens, values, strict=True)):
        line, column = divmod(place, _STRIP_COLUMNS)
        cut = token if len(token) <= _STRIP_LETTERS else token[: _STRIP_LETTERS - 1] + "…"
        ink = _cell(axes, column, line, _shade(_UP, value))
        axes.text(column, line - 0.2, cut, ha="center", va="center", fontsize=SMALL, color=ink, fontweight="bold")
        axes.text(column, line + 0.24, f"{value:.2f}", ha="center", va="center", fontsize=SMALL, color=ink)
    _frame(axes, columns=_STRIP_COLUMNS, rows=lines)
    return figure


def token_push_maps(
    pushes: "Mapping[str, Tensor]",
    completion_mask: "Tensor",
    *,
    row_labels: Sequence[str],
    stopped: "Mapping[str, Tensor] | None" = None,
) -> "Figure":
    """Draw which way, and how hard, each loss pushes each token's log-probability: a map for each loss, one scale.

    Args:
        pushes: name of a loss → (B, C), −∂loss/∂logps; blue pushes up, vermilion down, padding stays empty.
        completion_mask: (B, C), 1 if a token counts.
        row_labels: one per completion.
        stopped: name → (B, C) bool, tokens that a clip has stopped, drawn as ×.

    >>> import torch
    >>> mask = torch.tensor([[1, 1], [1, 0]])
    >>> figure = token_push_maps({"dapo": mask / 3}, mask, row_labels=["right", "wrong"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['.33', '.33', '.33']
    """
    shape = completion_mask.shape
    largest = max(float(push.abs().max()) for push in pushes.values()) or 1.0
    figure, grid = panel_grid(len(pushes), height=0.35 + (0.55 + 0.29 * shape[0]) * ((len(pushes) + 1) // 2))
    for axes, (name, push) in zip(grid, pushes.items(), strict=True):
        style_axes(axes, name, "", "")
        for row, column in completion_mask.nonzero().tolist():
            value = float(push[row, column])
            ink = _cell(axes, column, row, _shade(_UP if value > 0 else _DOWN, abs(value) / largest))
            halted = stopped is not None and name in stopped and bool(stopped[name][row, column])
            text = "×" if halted else f"{value:.2f}".replace("0.", ".").replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=ink)
        _frame(axes, columns=shape[1], rows=shape[0])
        axes.set_yticks(range(shape[0]), row_labels)
        axes.tick_params(left=False)
    return figure


def _bounds(epsilon: float, epsilon_high: float | None, loss_type: str) -> list[float]:
    from grpo_edu.losses import find_loss

    high = epsilon if epsilon_high is None else epsilon_high
    return {"": [], "weight": [high], "ratio": [1 - epsilon, 1 + high]}[find_loss(loss_type).clips]


def _shade(color: str, strength: float) -> tuple[float, ...]:
    """Return the color mixed with paper: none of it at 0, all of it at 1."""
    from matplotlib.colors import to_rgb

    return tuple(
        strength * ink + (1 - strength) * paper for ink, paper in zip(to_rgb(color), to_rgb(PAPER), strict=True)
    )


def _cell(axes: "Axes", column: int, row: int, color: tuple[float, ...]) -> str:
    """Draw one cell; returns the color in which a text on it can be read."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=color, edgecolor=GRID, linewidth=0.8))
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    return INK if luminance > 0.55 else PAPER


def _frame(axes: "Axes", *, columns: int, rows: int) -> None:
    """Fit the axes around cells, without ticks, grid or spines."""
    axes.set_xlim(-0.55, columns - 0.45)
    axes.set_ylim(rows - 0.45, -0.55)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
