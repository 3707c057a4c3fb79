"""The stored notebooks: run top to bottom, without litter, readable, and compared wherever they can be.

`course.py test` runs them under strict nbval. A notebook stripped of its outputs would pass that, and so would one
whose every cell is tagged to be ignored; this file holds what nbval does not. Each check is tried on a spoiled
notebook too.
"""

import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

# The cells whose output nbval does not compare, by the first line of their source: what differs between machines.
NOT_COMPARED = {
    "00_start_here": ["from grpo_edu.machine.hardware import cpu_report", "again = grpo_edu.generate("],
    "01_cpu_setup": [
        "report = cpu_report()",
        "def loaded_openmp():",
        "print(startup_text(seconds))",
        "from grpo_edu.machine.probe import probe_dtypes",
    ],
    "02_reward_functions": [
        "for text in dict.fromkeys(samples[:24]):",
        'print(f"right before: {before.k}/{before.n}, after: {hacked.k}/{hacked.n}\\n")',
        'for name, outcome in {"equal weights": loss, "small weights": gain}.items():',
    ],
    "03_group_advantages": ["for name, b in marks.items():"],
    "05_grpo_run": ['runs = {"before": before, "after": after}', "for row in (0, 100, 101, 200, 201):"],
    "06_honest_evaluation": ["import tempfile"],
    "07_quantization": ["for scheme, value in moved.items():"],
    "08_ewc_progressive_training": ["measures = plain.measures()"],
    "09_memory_and_lora": ["import time", "if free < need + 1.5 * GB:"],
    "11_scaling_out": ["try:", "import time", "from grpo_edu.machine.step_process import measure_steps"],
}
LONGEST_CELL = 30  # lines
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def read(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nbformat warns of missing and repeated cell ids, and mends them in memory
        return nbformat.read(FOLDER / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "markdown"]


def first_line(cell):
    return cell.source.strip().partition("\n")[0]


def tags(cell):
    return cell.metadata.get("tags", [])


def output_texts(cell):
    """Every text of a cell's outputs that a reader sees, as (mime type or stream name, text)."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.name, output.text
        elif output.output_type != "error":
            yield from ((mime, text) for mime, text in output.data.items() if isinstance(text, str))


class ImageFinder(HTMLParser):
    """Collects the attributes of each <img>."""

    def __init__(self, text):
        super().__init__()
        self.images = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes))


def images(cell):
    return [image for mime, text in output_texts(cell) if mime == "text/html" for image in ImageFinder(text).images]


def prose(cell):
    """Markdown without code blocks and code spans, where neither a link nor mathematics is one."""
    text = re.sub(r"^```.*?^```", "", cell.source, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


# ---- the checks ----


def check_format(notebook):
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"


def check_ran_top_to_bottom(notebook):
    cells = code_cells(notebook)
    assert cells and all(cell.source.strip() for cell in cells), "no code, or an empty code cell"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "execute_result":
                assert output.execution_count == cell.execution_count, first_line(cell)


def check_no_error_and_no_litter(notebook):
    for cell in code_cells(notebook):
        kinds = [output.output_type for output in cell.outputs]
        assert "error" not in kinds, first_line(cell)
        for kind, text in output_texts(cell):
            assert kind != "stderr", f"{first_line(cell)}: {text}"
            assert not re.search(r"Warning\b|Traceback \(most|\x1b\[", text), f"{first_line(cell)}: {text}"


def check_printed_text_is_in_one_piece(notebook):
    """GitHub and nbconvert break the line between two pieces; nbclient joins them with coalesce_streams=True."""
    for cell in code_cells(notebook):
        kinds = [output.output_type for output in cell.outputs]
        assert ("stream", "stream") not in set(zip(kinds, kinds[1:], strict=False)), first_line(cell)


def check_outputs_are_stable_where_compared(notebook):
    for cell in code_cells(notebook):
        for _, text in output_texts(cell):
            assert not re.search(r"\b0x[0-9a-f]{6,}", text), f"a memory address: {first_line(cell)}"


def check_code_cells_are_short(notebook):
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= LONGEST_CELL, first_line(cell)


def check_not_compared(notebook, allowed):
    found = []
    for cell in code_cells(notebook):
        assert not re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source), "use a tag, so that this list holds it"
        if {"nbval-ignore-output", "nbval-skip", "nbval-raises-exception", "raises-exception"} & {*tags(cell)}:
            found.append(first_line(cell))
    assert found == allowed


def check_opening(notebook, number):
    opening = notebook.cells[0]
    assert opening.cell_type == "markdown"
    assert re.match(rf"# {number} · \w", opening.source), "a title such as '# 03 · Group advantages'"
    before_list, *goals = re.split(r"^(?:\d+\.|[-*]) ", opening.source, flags=re.MULTILINE)
    assert re.search(r"\byou\s+will\b", before_list, re.IGNORECASE), "what one will be able to do, as a list"
    assert len(goals) >= 3, "at least three things that one will be able to do"
    for row, content in {"Before this": r"\w", "Time": r"\d.*(minute|second)", "Memory": r"\d.*[MG]B"}.items():
        assert re.search(rf"^\| \*\*{row}\*\* \|.*{content}", opening.source, re.MULTILINE), row


def check_close(notebook):
    kinds = [cell.cell_type for cell in notebook.cells]
    last_code = max(index for index, kind in enumerate(kinds) if kind == "code")
    text = "\n".join(cell.source for cell in notebook.cells[last_code + 1 :])
    points = text.partition("## Key points")[2]
    assert len(re.findall(r"^- \w", points, re.MULTILINE)) >= 3, "at least three key points"
    assert re.search(r"^\*\*Next:\*\* \S", points, re.MULTILINE), "where to go next"


def check_pictures(notebook):
    """Each has an alternative text, is in the notebook itself, and is followed by what it shows."""
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[\s*\]", prose(cell)), f"no alternative text: {first_line(cell)}"
            assert all(image.get("alt", "").strip() for image in ImageFinder(prose(cell)).images)
            continue
        for mime, _ in output_texts(cell):
            assert not mime.startswith("image/"), f"use html_image, for the alt text: {first_line(cell)}"
        for image in images(cell):
            assert len((image.get("alt") or "").split()) >= 4, f"alt says too little: {first_line(cell)}"
            stored = ("data:image/png;base64,iVBOR", "data:image/svg+xml;base64,")
            assert image["src"].startswith(stored), first_line(cell)
        if images(cell):
            assert following is not None and following.cell_type == "markdown", first_line(cell)
            said = re.sub(r"^#.*$", "", following.source, flags=re.MULTILINE)
            assert re.search(r"\w.*[.:]", said), f"no sentence after the picture of: {first_line(cell)}"


def check_progress_bars_are_stored(notebook):
    """A widget without its stored state shows as an error to whoever opens the notebook."""
    models = notebook.metadata.get("widgets", {}).get(WIDGET_STATE, {"state": {}})["state"]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            view = output.get("data", {}).get(WIDGET_VIEW)
            assert view is None or view["model_id"] in models, first_line(cell)
    bars = [model["state"] for model in models.values() if model["model_name"] == "FloatProgressModel"]
    assert all(bar["value"] == bar["max"] and bar["bar_style"] == "success" for bar in bars), "a bar that did not end"


def check_links(notebook, folder):
    for cell in markdown_cells(notebook):
        for target in re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", prose(cell)):
            if re.match(r"[a-z]+:", target):
                assert target.startswith("https://"), target
                continue
            path, _, anchor = target.partition("#")
            resolved = (folder / path).resolve() if path else None
            if resolved:
                assert resolved.is_relative_to(folder.parent) and resolved.exists(), target
            if anchor and (not resolved or resolved.suffix == ".ipynb"):
                named = nbformat.read(resolved, as_version=4) if resolved else notebook
                assert anchor in headings(named), target


def headings(notebook):
    """The anchors that JupyterLab gives to headings."""
    found = (re.findall(r"^#+ (.+?)\s*$", cell.source, re.MULTILINE) for cell in markdown_cells(notebook))
    return {heading.replace(" ", "-") for cell in found for heading in cell}


def check_mathematics(notebook):
    """Dollars come in pairs, braces and environments too."""
    for cell in markdown_cells(notebook):
        text = prose(cell).replace(r"\$", "")
        displays = text.split("$$")
        assert len(displays) % 2 == 1, f"a $$ without its pair: {first_line(cell)}"
        formulas = displays[1::2]
        for paragraph in "\n\n".join(displays[::2]).split("\n\n"):
            pieces = paragraph.split("$")
            assert len(pieces) % 2 == 1, f"a $ without its pair: {paragraph}"
            formulas += pieces[1::2]
        for formula in formulas:
            bare = re.sub(r"\\[{}]", "", formula)
            assert formula.strip() and bare.count("{") == bare.count("}"), formula
            assert formula.count(r"\left") == formula.count(r"\right") + formula.count(r"\leftarrow"), formula
            assert formula.count(r"\begin{") == formula.count(r"\end{"), formula


def check_no_place_of_the_machine(notebook):
    """Neither in sources nor outputs nor metadata: a folder of whoever ran it last."""
    places = {str(Path.home()), str(REPOSITORY)} - {"/"}
    for text in strings(notebook):
        text = re.sub(r"base64,[\w+/=]+", "", text)
        assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|Users|mnt|opt|var|usr)/|\b[A-Z]:\\Users", text), text
        assert not any(place in text for place in places), text


def strings(node):
    if isinstance(node, dict):
        for key, value in node.items():
            yield key
            yield from strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from strings(value)
    elif isinstance(node, str):
        yield node


CHECKS = {
    "format": check_format,
    "ran top to bottom": check_ran_top_to_bottom,
    "no error, no litter": check_no_error_and_no_litter,
    "printed text in one piece": check_printed_text_is_in_one_piece,
    "stable outputs": check_outputs_are_stable_where_compared,
    "short code cells": check_code_cells_are_short,
    "closes with key points": check_close,
    "pictures": check_pictures,
    "progress bars": check_progress_bars_are_stored,
    "mathematics": check_mathematics,
    "no place of the machine": check_no_place_of_the_machine,
    "links": lambda notebook: check_links(notebook, FOLDER),
}

# ---- the shipped notebooks ----


def test_the_notebooks_are_there():
    assert {"00_start_here", "05_grpo_run"} <= {*NOTEBOOKS}
    assert {*NOT_COMPARED} <= {*NOTEBOOKS}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name, check):
    CHECKS[check](read(name))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_opens_with_what_one_will_be_able_to_do(name):
    check_opening(read(name), name[:2])


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_the_listed_cells_are_not_compared(name):
    check_not_compared(read(name), NOT_COMPARED.get(name, []))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_fewer_than_one_cell_in_eight_is_not_compared(name):
    assert 8 * len(NOT_COMPARED.get(name, [])) < len(code_cells(read(name)))


# ---- the checks catch what they are for ----


def picture(alt, src="data:image/png;base64,iVBORw0KGgo="):
    data = {"text/html": f'<img alt="{alt}" src="{src}">', "text/plain": "<image>"}
    return new_output("execute_result", data=data, execution_count=2)


def small_notebook():
    opening = (
        "# 42 · An example\n\n**You will be able to**\n1. see;\n2. name;\n3. do.\n\n| | |\n|---|---|\n"
        "| **Before this** | nothing |\n| **Time** | 1 minute |\n| **Memory** | about 1 GB |"
    )
    code = new_code_cell("print('hello')", execution_count=1, outputs=[new_output("stream", text="hello\n")])
    drawing = new_code_cell("draw()", execution_count=2, outputs=[picture("A line that rises from 0")])
    bar = new_output("display_data", data={"text/plain": "  0%|          |", WIDGET_VIEW: {"model_id": "abc"}})
    state = {"abc": {"model_name": "FloatProgressModel", "state": {"value": 3.0, "max": 3.0, "bar_style": "success"}}}
    cells = [
        new_markdown_cell(opening),
        code,
        drawing,
        new_markdown_cell("The line rises. With $x^2$ as in\n\n$$\\frac{1}{2} x$$\n\nsee [the licence](../LICENSE)."),
        new_code_cell("bar()", execution_count=3, outputs=[bar]),
        new_markdown_cell("## Key points\n\n- one\n- two\n- three\n\n**Next:** `43`"),
    ]
    metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
        "widgets": {WIDGET_STATE: {"state": state, "version_major": 2, "version_minor": 0}},
    }
    return new_notebook(cells=cells, metadata=metadata)


def strip_outputs(notebook):
    for cell in code_cells(notebook):
        cell.update(execution_count=None, outputs=[])


def out_of_order(notebook):
    notebook.cells[1].execution_count = 7


def with_output(output):
    return lambda notebook: notebook.cells[1].outputs.append(output)


def with_source(index, old, new):
    def spoil(notebook):
        assert old in notebook.cells[index].source
        notebook.cells[index].source = notebook.cells[index].source.replace(old, new)

    return spoil


def with_picture(output):
    return lambda notebook: notebook.cells[2].update(outputs=[output])


def unfinished_bar(notebook):
    notebook.metadata.widgets[WIDGET_STATE].state.abc.state.value = 2.0


SPOILED = [
    ("format", lambda notebook: notebook.metadata.pop("kernelspec")),
    ("ran top to bottom", strip_outputs),
    ("ran top to bottom", out_of_order),
    ("ran top to bottom", lambda notebook: notebook.cells.insert(1, new_code_cell(""))),
    ("no error, no litter", with_output(new_output("error", ename="E", evalue="v", traceback=[]))),
    ("no error, no litter", with_output(new_output("stream", name="stderr", text="100%\n"))),
    ("no error, no litter", with_output(new_output("stream", text="x.py:3: UserWarning: mind\n"))),
    ("printed text in one piece", with_output(new_output("stream", text="hello again\n"))),
    ("stable outputs", with_output(new_output("stream", text="<Thing at 0x7f0a12bc>\n"))),
    ("short code cells", with_source(1, "print('hello')", "pass\n" * 31)),
    ("closes with key points", lambda notebook: notebook.cells.append(new_code_cell("1"))),
    ("closes with key points", with_source(-1, "**Next:** ", "")),
    ("pictures", with_picture(picture(""))),
    ("pictures", with_picture(picture("A line that rises from 0", src="picture.png"))),
    ("pictures", with_output(new_output("display_data", data={"image/png": "iVBORw0KGgo="}))),
    ("pictures", lambda notebook: notebook.cells.pop(3)),
    ("pictures", with_source(3, "The line rises.", "![](../LICENSE)")),
    ("progress bars", lambda notebook: notebook.metadata.pop("widgets")),
    ("progress bars", unfinished_bar),
    ("mathematics", with_source(3, "$x^2$", "$x^2")),
    ("mathematics", with_source(3, "{2}", "{2")),
    ("links", with_source(3, "../LICENSE", "../LICENCE")),
    ("links", with_source(3, "../LICENSE", "#No-such-heading")),
    ("links", with_source(3, "../LICENSE", "../../elsewhere")),
    ("no place of the machine", with_source(1, "hello", "/home/ada/grpo")),
    ("no place of the machine", with_output(new_output("stream", text=f"{REPOSITORY}\n"))),
]


@pytest.mark.parametrize("check", CHECKS)
def test_a_sound_notebook_passes(check):
    CHECKS[check](small_notebook())
    check_opening(small_notebook(), "42")
    check_not_compared(small_notebook(), [])


@pytest.mark.parametrize("number", range(len(SPOILED)), ids=[check for check, _ in SPOILED])
def test_a_spoiled_notebook_is_caught(number):
    check, spoil = SPOILED[number]
    notebook = small_notebook()
    spoil(notebook)
    with pytest.raises((AssertionError, AttributeError, nbformat.ValidationError)):
        CHECKS[check](notebook)


@pytest.mark.parametrize("missing", ["3. do.", "| **Time** | 1 minute |", "about 1 GB", "# 42 · "])
def test_a_poor_opening_is_caught(missing):
    notebook = small_notebook()
    with_source(0, missing, "")(notebook)
    with pytest.raises(AssertionError):
        check_opening(notebook, "42")


@pytest.mark.parametrize("way", ["tag", "comment"])
def test_a_cell_that_escapes_comparison_is_caught(way):
    notebook = small_notebook()
    if way == "tag":
        notebook.cells[1].metadata["tags"] = ["nbval-ignore-output"]
    else:
        notebook.cells[1].source = "# NBVAL_IGNORE_OUTPUT\nprint('hello')"
    with pytest.raises(AssertionError):
        check_not_compared(notebook, [])


# ---- nbval as `course.py test` sets it up ----

DRAWING = """\
from matplotlib.figure import Figure
from grpo_edu.figures.curves import html_image

figure = Figure(figsize=(1, 1))
figure.add_subplot().plot([0, {end}])
"""
BAR = "from tqdm.auto import tqdm\n\nfor _ in tqdm(range(3)):\n    pass"
BAR_TEXT = "  0%|          | 0/3 [00:00<?, ?it/s]"


def drawn(end, alt):
    """The output that a cell with this drawing stores."""
    space = {}
    exec(DRAWING.format(end=end), space)
    image = space["html_image"](space["figure"], alt)
    return new_output(
        "execute_result", data={"text/html": image._repr_html_(), "text/plain": repr(image)}, execution_count=1
    )


def nbval_command(monkeypatch):
    """What `course.py test` runs on the notebooks, without the notebooks."""
    import course

    commands = []
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(course, "run", lambda command, *rest, **options: commands.append(command) or 0)
    course.test([])
    (command,) = [command for command in commands if "--nbval" in command]
    return [sys.executable, *(str(part) for part in command[1:] if not str(part).endswith(".ipynb"))]


@pytest.mark.slow
def test_nbval_compares_texts_and_alt_texts_but_no_pixels_and_no_progress(tmp_path, monkeypatch):
    view = {"model_id": "0" * 32, "version_major": 2, "version_minor": 0}
    bar = new_output("display_data", data={"text/plain": BAR_TEXT, WIDGET_VIEW: view})
    good, other = "The line rises from 0 to 1", "The line falls from 0 to 1"
    cells = {
        "the same text": ("print('hello')", new_output("stream", text="hello\n")),
        "another text": ("print('hello')", new_output("stream", text="hallo\n")),
        "no output stored": ("print('hello')", None),
        "the same picture": (DRAWING.format(end=1) + f"html_image(figure, {good!r})", drawn(1, good)),
        "other pixels": (DRAWING.format(end=1) + f"html_image(figure, {good!r})", drawn(-1, good)),
        "another alt": (DRAWING.format(end=1) + f"html_image(figure, {good!r})", drawn(1, other)),
        "a bar": (BAR, bar),
    }
    assert drawn(1, good) != drawn(-1, good)
    notebook = new_notebook(
        cells=[new_code_cell(code, execution_count=1, outputs=[out] if out else []) for code, out in cells.values()],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    path, report = tmp_path / "small.ipynb", tmp_path / "report.xml"
    nbformat.write(notebook, path)
    command = [*nbval_command(monkeypatch), "-c", "pyproject.toml", "-p", "no:cacheprovider", f"--junitxml={report}"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*command, str(path)], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)
    items = ElementTree.parse(report).iter("testcase")
    outcomes = ["failed" if list(item) else "passed" for item in items]
    assert dict(zip(cells, outcomes, strict=True)) == {
        "the same text": "passed",
        "another text": "failed",
        "no output stored": "failed",
        "the same picture": "passed",
        "other pixels": "passed",
        "another alt": "failed",
        "a bar": "passed",
    }, done.stdout
