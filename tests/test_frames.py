"""Animations: every frame is shown once and in order, with its numbers, and fits into its picture."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import pytest

from grpo_edu.figures.frames import html_animation, probability_svg

FRAMES = [[0.5, 0.25, 0.25], [0.6, 0.3, 0.1], [0.75, 0.2, 0.05], [1.0, 0.0, 0.0]]
NAMES = ["first < second", "second", "third"]
SVG = probability_svg(FRAMES, NAMES, title="The first & the others", notes=["start", "one", "two", "three"])
SPACE = "{http://www.w3.org/2000/svg}"


def frames():
    return [group for group in ElementTree.fromstring(SVG).iter(f"{SPACE}g") if group.get("class") == "frame"]


def shown(update):
    """From and until which percentage of the loop a frame is visible."""
    rule = re.search(rf"@keyframes k{update}\{{(.*?\}})\}}", SVG).group(1)
    visible = re.search(r"([\d.]+)%\{visibility:visible\}", rule).group(1)
    until = re.search(r"%\{visibility:visible\}([\d.]+)%\{visibility:hidden\}", rule)
    return float(visible), float(until.group(1)) if until else 100.0


def test_each_frame_has_its_numbers_and_its_note():
    for update, (group, values) in enumerate(zip(frames(), FRAMES, strict=True)):
        texts = [text.text for text in group.iter(f"{SPACE}text")]
        assert texts[0].startswith(f"Update {update} of 3") and texts[0].endswith(
            ("start", "one", "two", "three")[update]
        )
        assert texts[1:] == [f"{value:.2f}" for value in values]
        widths = [float(bar.get("width")) for bar in group.iter(f"{SPACE}rect")]
        assert widths == pytest.approx([190 * value for value in values], abs=0.06)


def test_the_frames_follow_each_other_without_a_gap():
    times = [shown(update) for update in range(len(FRAMES))]
    assert times[0][0] == 0 and times[-1][1] == 100
    assert [end for _, end in times[:-1]] == [start for start, _ in times[1:]]


def test_the_last_frame_stands_still_where_less_motion_is_asked_for():
    rule = re.search(r"prefers-reduced-motion:reduce\)\{(.*)\}\}", SVG).group(1)
    assert "#f3{visibility:visible" in rule and "animation:none" in rule


def test_everything_lies_inside_the_picture_and_texts_are_large_enough():
    root = ElementTree.fromstring(SVG)
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in [*root.iter(f"{SPACE}text"), *root.iter(f"{SPACE}circle")]:
        x = float(shape.get("x") or shape.get("cx"))
        y = float(shape.get("y") or shape.get("cy"))
        assert 0 < x < width and 0 < y < height - 4
    sizes = [int(size) for size in re.findall(r"font-size:(\d+)px", SVG)]
    assert min(sizes) >= 13


def test_the_image_has_an_alternative_text_and_stays_small():
    long = probability_svg([[0.25] * 4] * 121, ["a", "b", "c", "d"], title="x", notes=["arm C, reward 1"] * 121)
    assert len(html_animation(long).html) < 300_000
    image = html_animation(SVG).html
    assert 'alt="The first &amp; the others: probability of first &lt; second' in image
    payload = re.search(r"base64,([^\"]+)", image).group(1)
    assert base64.b64decode(payload).decode() == SVG


def test_an_animation_describes_itself():
    svg = probability_svg([[0.5, 0.5], [0.75, 0.25]], ["left & up", "right"], title="Left wins")
    said = html_animation(svg).alt
    assert (
        said.startswith("Left wins")
        and "left & up from 0.50 to 0.75, right from 0.50 to 0.25" in said.partition("≈")[2]
    )
