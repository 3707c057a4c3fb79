"""Draw the probabilities of a few actions, tokens or answers update by update, as stored frames that play in a loop.

The picture is one SVG image with CSS animation, so it needs neither a kernel nor JavaScript. Every frame also holds the
whole curves, so a reader who sees no motion (on paper, or with motion switched off) still sees all numbers.
"""

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_edu.figures.style import COLORS, GRID, INK, PAPER, image_tag

if TYPE_CHECKING:
    from grpo_edu.figures.curves import HTMLImage

_WIDTH, _TOP, _ROW, _FOOT = 672, 64, 54, 20  # pixels: the picture, above the rows, one row, below them
_NAME, _BAR, _BAR_WIDTH, _CURVE, _CURVE_WIDTH = 16, 150, 190, 410, 236  # where the columns begin, and their widths
_HEIGHT = 34  # of a bar and of a curve
_FONT = "font-family:Helvetica,Arial,sans-serif"
_HOLD = 2.0  # seconds that the first and the last frame stay


def probability_svg(
    frames: Sequence[Sequence[float]], names: Sequence[str], *, title: str, notes: Sequence[str] = (), rate: float = 6.0
) -> str:
    """Return an SVG that plays the frames in a loop: one row per action with its probability as a bar and as a curve.

    It shows the last frame first, and then begins at the start.

    Args:
        frames: F >= 2 rows of K probabilities, the first before training, one more after each update.
        names: K names, each drawn at the left of its row; at most 16 characters are shown well.
        title: what the animation shows, in a sentence.
        notes: F short texts, one per frame, shown at the right of the update's number; none by default.
        rate: frames per second. The first and the last frame stay for two seconds more.

    >>> svg = probability_svg([[0.5, 0.5], [0.6, 0.4]], ["left", "right"], title="Left becomes more likely")
    >>> svg.count('class="frame"'), "0.60" in svg
    (2, True)
    """
    last = len(frames) - 1
    step = 1 / rate
    starts = [0.0] + [_HOLD + update * step for update in range(1, len(frames))]
    length = starts[-1] + step + _HOLD
    ends = [*starts[1:], length]
    height = _TOP + _ROW * len(names) + _FOOT
    rules = [
        # It begins with the last frame: some browsers do not start an animation that JupyterLab has just inserted.
        f".frame{{visibility:hidden;animation:{length:.2f}s step-end -{starts[-1]:.2f}s infinite}}",
        # whoever asks for less motion sees the last frame
        f"@media (prefers-reduced-motion:reduce){{.frame{{animation:none!important}}#f{last}{{visibility:visible}}}}",
    ]
    drawn = []
    for update, values in enumerate(frames):
        first, end = 100 * starts[update] / length, 100 * ends[update] / length
        opening = "0%{visibility:hidden}" if update else ""
        closing = "" if update == last else f"{end:.3f}%{{visibility:hidden}}"
        rules.append(f"@keyframes k{update}{{{opening}{first:.3f}%{{visibility:visible}}{closing}}}")
        note = notes[update] if notes else ""
        drawn.append(_frame(update, last, values, note))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<title>{html.escape(title)}</title><desc>{html.escape(_words(frames, names, title))}</desc>",
        f"<style>text{{{_FONT};font-size:13px;fill:{INK}}}{''.join(rules)}</style>",
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="{PAPER}"/>',
        f'<text x="{_NAME}" y="26" style="font-size:15px;font-weight:bold">{html.escape(title)}</text>',
        *_columns(frames, names, last),
        *drawn,
        "</svg>",
    ]
    return "\n".join(parts)


def _words(frames: Sequence[Sequence[float]], names: Sequence[str], title: str) -> str:
    """Return the alternative text: the title, the rows, and after ≈ where each probability begins and ends."""
    first, last = frames[0], frames[-1]
    ends = (f"{name} from {first[row]:.2f} to {last[row]:.2f}" for row, name in enumerate(names))
    shown = f"probability of {', '.join(names)} over {len(frames) - 1} updates"
    return f"{title}: {shown}. Values: ≈ {', '.join(ends)}"


def html_animation(svg: str) -> "HTMLImage":
    """Return the SVG as an image with alternative text, inside a block that the reader can close to stop the motion.

    With `tests/nbval_sanitize.cfg`, nbval compares the alternative text and ignores the bytes of the picture.

    svg: from `probability_svg`. The text says its title, and where each probability begins and ends.

    >>> html_animation(probability_svg([[0.5], [0.6]], ["left"], title="Left"))
    <image: Left: probability of left over 1 updates. Values: ≈ left from 0.50 to 0.60>
    """
    from grpo_edu.figures.curves import HTMLImage

    alt = html.unescape("".join(re.findall("<desc>(.*?)</desc>", svg, re.DOTALL)))
    image = image_tag(svg.encode(), "svg+xml", alt, _WIDTH)
    return HTMLImage(f"<details open><summary>Animation (click here to hide it)</summary>{image}</details>", alt)


def _columns(frames: Sequence[Sequence[float]], names: Sequence[str], last: int) -> list[str]:
    """Return what stays the same in all frames: names, the grounds of bars and curves, the curves, the labels below."""
    parts = []
    for row, name in enumerate(names):
        top = _TOP + row * _ROW
        points = []
        for update, values in enumerate(frames):
            points.append(f"{_across(update, last):.1f},{_up(top, values[row]):.1f}")
        parts += [
            f'<text x="{_NAME}" y="{top + 22}">{html.escape(name)}</text>',
            f'<rect x="{_BAR}" y="{top}" width="{_BAR_WIDTH}" height="{_HEIGHT}" fill="{GRID}" opacity=".5"/>',
            f'<rect x="{_CURVE}" y="{top}" width="{_CURVE_WIDTH}" height="{_HEIGHT}" fill="{GRID}" opacity=".5"/>',
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{_color(row)}" stroke-width="2"/>',
        ]
    below = _TOP + len(names) * _ROW
    parts += [
        f'<text x="{_BAR}" y="{below + 4}">0</text>',
        f'<text x="{_BAR + _BAR_WIDTH}" y="{below + 4}" text-anchor="end">1</text>',
        f'<text x="{_BAR + _BAR_WIDTH / 2}" y="{below + 4}" text-anchor="middle">probability now</text>',
        f'<text x="{_CURVE}" y="{below + 4}">0</text>',
        f'<text x="{_CURVE + _CURVE_WIDTH}" y="{below + 4}" text-anchor="end">{last}</text>',
        f'<text x="{_CURVE + _CURVE_WIDTH / 2}" y="{below + 4}" text-anchor="middle">after each update</text>',
    ]
    return parts


def _frame(update: int, last: int, values: Sequence[float], note: str) -> str:
    """Return what one frame adds: the number of the update, the bars with their values, and a dot on each curve."""
    said = f"Update {update} of {last}" + (f": {note}" if note else "")
    parts = [f'<g class="frame" id="f{update}" style="animation-name:k{update}">']
    parts.append(f'<text x="{_NAME}" y="48">{html.escape(said)}</text>')
    x = _across(update, last)
    for row, value in enumerate(values):
        top = _TOP + row * _ROW
        color = _color(row)
        parts += [
            f'<rect x="{_BAR}" y="{top}" width="{_BAR_WIDTH * value:.1f}" height="{_HEIGHT}" fill="{color}"/>',
            f'<text x="{_BAR + _BAR_WIDTH + 8}" y="{top + 22}">{value:.2f}</text>',
            f'<circle cx="{x:.1f}" cy="{_up(top, value):.1f}" r="4.5" fill="{color}" stroke="{PAPER}"/>',
        ]
    return "".join([*parts, "</g>"])


def _color(row: int) -> str:
    return COLORS[row % len(COLORS)]


def _across(update: int, last: int) -> float:
    return _CURVE + _CURVE_WIDTH * update / last


def _up(top: int, value: float) -> float:
    return top + _HEIGHT * (1 - value)
