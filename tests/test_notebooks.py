"""The stored notebooks: run top to bottom, without litter, readable, and compared wherever they can be.

`course.py test` runs them under strict nbval. A notebook stripped of its outputs would pass that, and so would one
whose every cell is tagged to be ignored; this file holds what nbval does not. Each check is tried on a spoiled
notebook too.

The notebooks of the course have the form that docs/contributing.md describes (*The form of a notebook*).
"""

import functools
import re
import shutil
import warnings
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import run_notebooks
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from run_notebooks import WIDGET_STATE, WIDGET_VIEW

from course import CORE_PATH

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))

# The cells whose output nbval does not compare, by the first line of their source: what differs between machines.
NOT_COMPARED = {
    "00_start_here": ["for completion in eight_answers():"],
    "11_memory_and_lora": ["if free < need + 1.5e9:"],
}
# The course in its order: each notebook's file and its name on the course map.
COURSE = {
    "00_start_here": "Start here",
    "01_cpu_setup": "CPU setup",
    "02_reward_functions": "Reward functions",
    "03_policy_gradients": "Policy gradients",
    "04_group_advantages": "Group advantages",
    "05_grpo_objective": "The GRPO objective",
    "06_losses": "The family of losses",
    "07_grpo_run": "A full GRPO run",
    "08_honest_evaluation": "Honest evaluation",
    "09_quantization": "Quantization",
    "10_ewc_progressive_training": "EWC and progressive training",
    "11_memory_and_lora": "Memory and LoRA",
    "12_diagnosis_lab": "Diagnosis lab",
    "13_scaling_out": "Scaling out",
    "14_real_language_model": "A real language model",
    "15_your_own_task": "Your own task",
    "16_several_turns": "Several turns",
}
LONGEST_CELL = 40  # lines
# JupyterLab shows the first line of what is collapsed, which must not give an answer away.
OF_HIDDEN_INPUT, OF_HIDDEN_OUTPUT = "# Checks your answer.", 'print("Result")'
MOST_WORDS, MOST_CODE_LINES = 2000, 300  # of a notebook's core; readers asked for the last 200 words of explanation
MAX_LINE_WIDTH = 84  # characters that the book shows at 1280 pixels without a scroll bar
FEWEST_TURNS = 3  # calls of your_turn


@functools.cache
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


def check_pictures(notebook):
    """Each has an alternative text, is in the notebook itself, and is followed by what it shows."""
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if cell.cell_type == "markdown":
            assert not re.search(r"!\[\s*\]", prose(cell)), f"no alternative text: {first_line(cell)}"
            assert all(image.get("alt", "").strip() for image in ImageFinder(prose(cell)).images)
            continue
        for output in cell.outputs:
            data = output.get("data", {})
            alone = any(mime.startswith("image/") for mime in data) and "text/html" not in data
            assert not alone, f"use html_image, for the alt text: {first_line(cell)}"
        for image in images(cell):
            assert len((image.get("alt") or "").split()) >= 4, f"alt says too little: {first_line(cell)}"
            stored = ("data:image/png;base64,iVBOR", "data:image/svg+xml;base64,")
            assert image["src"].startswith(stored), first_line(cell)
        if images(cell):
            assert following is not None and following.cell_type == "markdown", first_line(cell)
            said = re.sub(r"^#.*$", "", following.source, flags=re.MULTILINE)
            assert re.search(r"\w.*[.:]", said), f"no sentence after the picture of: {first_line(cell)}"


def check_outputs_need_no_style_sheet(notebook):
    """Check outputs as JupyterLab shows those it does not trust: no styles, no scripts, cells aligned at the right."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            page = output.get("data", {}).get("text/html", "")
            assert not re.search(r"<style|<script|\son\w+=", page), cell.id
            glued = re.search(r"[^\s>,.;:()]</?(b|i|em|small|span|strong)\b[^>]*>[^\s<,.;:()]", page)
            assert not glued, f"{cell.id}: {glued[0]} is read as one word"
            loose = [one for one in re.findall(r"<t[dh]\b[^>]*>(?!</t[dh]>)", page) if "text-align" not in one]
            assert not loose, f"{cell.id}: {loose[0]}"


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


# ---- the checks of a notebook of the course ----


def course_map(name):
    """The line of the first cell that links all notebooks and says which of them this one is."""
    entries = []
    for stem, title in COURSE.items():
        number = stem[:2]
        entries.append(f"**{number} {title} (you are here)**" if stem == name else f"[{number}]({stem}.ipynb)")
    return "Course map: " + " · ".join(entries)


def check_header(notebook, name):
    opening = notebook.cells[0].source
    assert re.match(rf"# {name[:2]} · \w", opening), "a title such as '# 04 · Group advantages'"
    goals = opening.partition("**You will be able to**")[2].partition("**You need**")[0]
    assert len(re.findall(r"^(?:\d+\.|-) \w", goals, re.MULTILINE)) >= 3, "at least three goals, then **You need**"
    facts = r"^Study time ≈ \d+ min · compute ≈ [\d.]+ (s|min) · memory ≈ [\d.]+ GB · difficulty [●○]{3}$"
    assert re.search(facts, opening, re.MULTILINE), "Study time ≈ 40 min · compute ≈ 30 s · memory ≈ 0.5 GB · …"
    assert course_map(name) in opening.splitlines(), f"the line\n{course_map(name)}"


def check_closing(notebook, name):
    closing = notebook.cells[-1].source
    parts = re.split(r"^(?:## |\*\*)(Key points|Exercises|Sources|Next:)(?:\*\*)?", closing, flags=re.MULTILINE)
    assert parts[1::2] == ["Key points", "Exercises", "Sources", "Next:"], "these parts in this order"
    points, exercises, sources, following = parts[2::2]
    assert len(re.findall(r"^- \w", points, re.MULTILINE)) >= 3, "at least three key points"
    assert 3 <= len(re.findall(r"^- .*\]\(https://", sources, re.MULTILINE)) <= 5, "three to five sources, linked"
    names = list(COURSE)
    if name != names[-1]:
        assert f"({names[names.index(name) + 1]}.ipynb)" in following, "a link to the next notebook"


def exercise_titles(name):
    """The headings in a notebook's exercises under which a function is checked, with the function's name."""
    found, title = {}, ""
    for cell in nbformat.read(REPOSITORY / "exercises" / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "markdown":
            title = (re.findall(r"^## (.+?)\s*$", cell.source, re.MULTILINE) or [title])[-1]
        for function in re.findall(r"checks\.check_(\w+)\(", cell.source):
            found[function] = title
    return found


def check_exercises(notebook, name):
    """A section leads to each exercise, by its title or by its function, and the end announces open questions."""
    *before, closing = [cell.source for cell in markdown_cells(notebook)]
    here = "\n".join(text for text in before if f"(../exercises/{name}.ipynb" in text)
    for function, title in exercise_titles(name).items():
        link = f"[Exercise {title}](../exercises/{name}.ipynb#{title.replace(' ', '-')})"
        assert link in here or f"`{function}`" in here, f"no section leads to {title}"
    assert f"(../exercises/{name}.ipynb)" in closing
    if "Open question" in (REPOSITORY / "exercises" / f"{name}.ipynb").read_text(encoding="utf-8"):
        assert "open question" in closing


def core(notebook):
    """The cells of a first reading: without a last section whose heading begins with "Optional"."""
    cells, optional = [], False
    for cell in notebook.cells[:-1]:
        optional = optional or (cell.cell_type == "markdown" and re.match(r"## Optional\b", cell.source) is not None)
        if not optional:
            cells.append(cell)
    return [*cells, notebook.cells[-1]]


def words(notebook):
    """The words of the core's Markdown, without link targets and the course map."""
    text = "\n".join(cell.source for cell in core(notebook) if cell.cell_type == "markdown")
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^Course map: .*$", "", text, flags=re.MULTILINE))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def lines_of_code(notebook):
    """The lines of the core's code that are not blank."""
    sources = [cell.source for cell in core(notebook) if cell.cell_type == "code"]
    lines = [line for source in sources for line in source.splitlines()]
    return sum(bool(line.strip()) and line not in (OF_HIDDEN_INPUT, OF_HIDDEN_OUTPUT) for line in lines)


def check_length(notebook):
    assert words(notebook) <= MOST_WORDS, f"{words(notebook)} words"
    assert lines_of_code(notebook) <= MOST_CODE_LINES, f"{lines_of_code(notebook)} lines of code"


def check_collapsed_cells_tell_nothing(notebook):
    for cell in code_cells(notebook):
        hidden, tags = cell.metadata.get("jupyter", {}), cell.metadata.get("tags", [])
        for part in ("source", "outputs"):  # JupyterLab reads one mark, the book the other
            in_the_book = {"source": "hide-input", "outputs": "hide-output"}[part] in tags
            assert hidden.get(f"{part}_hidden", False) == in_the_book, first_line(cell)
        if hidden.get("source_hidden"):
            assert cell.source.startswith(("from grpo_edu.checks import your_turn", "#")), first_line(cell)
        if hidden.get("outputs_hidden") and cell.outputs:
            assert cell.outputs[0].get("text", "").startswith("Result\n"), first_line(cell)


def check_numbers_instead_of_booleans(notebook):
    """No assertion in a student's cell, and no line of output whose only news is True or False."""
    for cell in code_cells(notebook):
        assert not re.search(r"^\s*assert\b", cell.source, re.MULTILINE), first_line(cell)
        for mime, text in output_texts(cell):
            if mime in ("stdout", "text/plain"):
                assert not re.search(r"(^|[:=?]\s*)(True|False)\.?$", text, re.MULTILINE), first_line(cell)


def check_predictions_are_hidden(notebook):
    """The next cell that uses `my_guess` has its stored output collapsed."""
    cells = code_cells(notebook)
    for number, cell in enumerate(cells):
        for guess in re.findall(r"^(my_\w*guess\w*) = None", cell.source, re.MULTILINE):
            users = [after for after in cells[number + 1 :] if re.search(rf"\b{guess}\b", after.source)]
            assert users, f"{guess} is never compared with what is measured"
            hidden = users[0].metadata.get("jupyter", {}).get("outputs_hidden")
            assert hidden and "hide-output" in tags(users[0]), f"the answer to {guess} is open"


def check_turns(notebook):
    turns = sum(cell.source.count("your_turn(") for cell in code_cells(notebook))
    assert turns >= FEWEST_TURNS, f"{turns} of at least {FEWEST_TURNS} short questions with feedback"


COURSE_CHECKS = {
    "header": check_header,
    "closing": check_closing,
    "exercises": check_exercises,
    "length": lambda notebook, name: check_length(notebook),
    "collapsed": lambda notebook, name: check_collapsed_cells_tell_nothing(notebook),
    "numbers instead of booleans": lambda notebook, name: check_numbers_instead_of_booleans(notebook),
    "hidden predictions": lambda notebook, name: check_predictions_are_hidden(notebook),
    "your turn": lambda notebook, name: check_turns(notebook),
}

CHECKS = {
    "format": check_format,
    "ran top to bottom": check_ran_top_to_bottom,
    "no error, no litter": check_no_error_and_no_litter,
    "printed text in one piece": check_printed_text_is_in_one_piece,
    "stable outputs": check_outputs_are_stable_where_compared,
    "short code cells": check_code_cells_are_short,
    "pictures": check_pictures,
    "no style sheet": check_outputs_need_no_style_sheet,
    "progress bars": check_progress_bars_are_stored,
    "mathematics": check_mathematics,
    "no place of the machine": check_no_place_of_the_machine,
    "links": lambda notebook: check_links(notebook, FOLDER),
}

# ---- the shipped notebooks ----


def test_the_notebooks_are_there():
    assert {*COURSE} == {name for name in NOTEBOOKS if not name.startswith("appendix_")}
    assert {*NOT_COMPARED} <= {*NOTEBOOKS}


def wide_lines(notebook):
    lines = [line for cell in code_cells(notebook) for line in cell.source.splitlines()]
    return [line for line in lines if len(line) > MAX_LINE_WIDTH]


def test_no_code_line_runs_out_of_the_box():
    assert wide_lines(new_notebook(cells=[new_code_cell("x = 1\n" + "y" * 85)])) == ["y" * 85]
    for folder in ("notebooks", "exercises", "solutions"):
        for path in (REPOSITORY / folder).rglob("*.ipynb"):
            assert not wide_lines(nbformat.read(path, as_version=4)), path.name


def test_every_claim_belongs_to_a_notebook():
    for claims in (REPOSITORY / "tests" / "claims").glob("*.py"):
        assert claims.stem in NOTEBOOKS
        assert re.search(r"^assert ", claims.read_text(encoding="utf-8"), re.MULTILINE), claims.name


def test_every_schematic_is_shown_and_has_its_own_background():
    texts = [cell.source for name in NOTEBOOKS for cell in markdown_cells(read(name))]
    for image in (FOLDER / "images").glob("*.svg"):
        assert any(f"(images/{image.name})" in text for text in texts), image.name
        root = ElementTree.parse(image).getroot()
        assert root.get("viewBox") and root.find("{http://www.w3.org/2000/svg}rect") is not None, image.name


def test_readme_and_course_map_say_the_study_time_of_each_notebook():
    stated = {name[:2]: re.search(r"^Study time ≈ (\d+) min", read(name).cells[0].source, re.M)[1] for name in COURSE}
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    drawn = (FOLDER / "images" / "course_map.svg").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| \[(\d\d) .* \| (\d+) \|$", readme, re.M)) == stated
    assert dict(re.findall(r">(\d\d)</tspan>.*\n.*>(\d+) min<", drawn)) == stated


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook(name, check):
    CHECKS[check](read(name))


@pytest.mark.parametrize("check", COURSE_CHECKS)
@pytest.mark.parametrize("name", COURSE)
def test_notebook_of_the_course(name, check):
    COURSE_CHECKS[check](read(name), name)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_the_listed_cells_are_not_compared(name):
    check_not_compared(read(name), NOT_COMPARED.get(name, []))


# ---- the checks catch what they are for ----


def picture(alt, src="data:image/png;base64,iVBORw0KGgo="):
    data = {"text/html": f'<img alt="{alt}" src="{src}">', "text/plain": "<image>"}
    return new_output("execute_result", data=data, execution_count=2)


def small_notebook():
    code = new_code_cell("print('hello')", execution_count=1, outputs=[new_output("stream", text="hello\n")])
    drawing = new_code_cell("draw()", execution_count=2, outputs=[picture("A line that rises from 0")])
    bar = new_output("display_data", data={"text/plain": "  0%|          |", WIDGET_VIEW: {"model_id": "abc"}})
    state = {"abc": {"model_name": "FloatProgressModel", "state": {"value": 3.0, "max": 3.0, "bar_style": "success"}}}
    cells = [
        new_markdown_cell("# 42 · An example"),
        code,
        drawing,
        new_markdown_cell("The line rises. With $x^2$ as in\n\n$$\\frac{1}{2} x$$\n\nsee [the licence](../LICENSE)."),
        new_code_cell("bar()", execution_count=3, outputs=[bar]),
        new_markdown_cell("## Key points"),
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


def with_cell(cell):
    return lambda notebook: notebook.cells.insert(1, cell)


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
    ("ran top to bottom", with_cell(new_code_cell(""))),
    ("no error, no litter", with_output(new_output("error", ename="E", evalue="v", traceback=[]))),
    ("no error, no litter", with_output(new_output("stream", name="stderr", text="100%\n"))),
    ("no error, no litter", with_output(new_output("stream", text="x.py:3: UserWarning: mind\n"))),
    ("printed text in one piece", with_output(new_output("stream", text="hello again\n"))),
    ("stable outputs", with_output(new_output("stream", text="<Thing at 0x7f0a12bc>\n"))),
    ("short code cells", with_source(1, "print('hello')", "pass\n" * (LONGEST_CELL + 1))),
    ("pictures", with_picture(picture(""))),
    ("pictures", with_picture(picture("A line that rises from 0", src="picture.png"))),
    ("pictures", with_output(new_output("display_data", data={"image/png": "iVBORw0KGgo="}))),
    ("pictures", lambda notebook: notebook.cells.pop(3)),
    ("pictures", with_source(3, "The line rises.", "![](../LICENSE)")),
    ("no style sheet", with_output(new_output("display_data", data={"text/html": "<style>b {}</style><b>1</b>"}))),
    ("no style sheet", with_output(new_output("display_data", data={"text/html": "You<small>won</small>"}))),
    ("no style sheet", with_output(new_output("display_data", data={"text/html": "<table><td>1</td></table>"}))),
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
    check_not_compared(small_notebook(), [])


@pytest.mark.parametrize("number", range(len(SPOILED)), ids=[check for check, _ in SPOILED])
def test_a_spoiled_notebook_is_caught(number):
    check, spoil = SPOILED[number]
    notebook = small_notebook()
    spoil(notebook)
    with pytest.raises((AssertionError, AttributeError, nbformat.ValidationError)):
        CHECKS[check](notebook)


NEW_NAME = "04_group_advantages"


def notebook_of_the_course():
    titles = exercise_titles(NEW_NAME).values()
    file = f"../exercises/{NEW_NAME}.ipynb"
    listed = " · ".join(f"[Exercise {title}]({file}#{title.replace(' ', '-')})" for title in titles)
    opening = (
        "# 04 · An example\n\n**You will be able to**\n- see\n- name\n- do\n\n**You need** nothing\n\n"
        "Study time ≈ 40 min · compute ≈ 30 s · memory ≈ 0.5 GB · difficulty ●●○\n\n" + course_map(NEW_NAME)
    )
    source = "- [One](https://example.org) adds this."
    closing = (
        f"## Key points\n- one\n- two\n- three\n\n## Exercises\nTwo open questions in [04]({file}).\n\n"
        f"## Sources\n{source}\n{source}\n{source}\n\n**Next:** [05](05_grpo_objective.ipynb)"
    )
    revealed = {"jupyter": {"outputs_hidden": True}, "tags": ["hide-output"]}
    answer = [new_output("stream", text="Result\nyour guess: None   measured: 0.42\n")]
    cells = [
        new_markdown_cell(opening),
        new_code_cell("my_guess = None  # a number"),
        new_code_cell("print(my_guess, measured)", metadata=revealed, outputs=answer),
        new_markdown_cell(listed),
        *(new_code_cell(f"your_turn(None, {number})") for number in range(3)),
        new_markdown_cell(closing),
    ]
    return new_notebook(cells=cells)


WRONG_FORM = [
    ("header", with_source(0, " · memory ≈ 0.5 GB", "")),
    ("closing", with_source(-1, "05_grpo", "07_grpo")),
    ("exercises", with_source(3, "Exercise 4", "RLOO")),
    ("length", with_cell(new_markdown_cell("word " * MOST_WORDS))),
    ("collapsed", lambda notebook: notebook.cells[2].outputs[0].update(text="measured: 0.42\n")),
    ("numbers instead of booleans", with_output(new_output("stream", text="x\nbetween 2 and 3: True\ny\n"))),
    ("numbers instead of booleans", with_cell(new_code_cell("assert x == 1"))),
    ("numbers instead of booleans", with_cell(new_code_cell("for x in y:\n    assert x"))),
    ("hidden predictions", lambda notebook: notebook.cells[2].metadata.pop("jupyter")),
    ("your turn", lambda notebook: notebook.cells.pop(4)),
]


@pytest.mark.parametrize("number", range(len(WRONG_FORM)), ids=[check for check, _ in WRONG_FORM])
def test_another_form_is_caught(number):
    check, spoil = WRONG_FORM[number]
    notebook = notebook_of_the_course()
    COURSE_CHECKS[check](notebook, NEW_NAME)
    spoil(notebook)
    with pytest.raises(AssertionError):
        COURSE_CHECKS[check](notebook, NEW_NAME)


def test_every_form_has_a_wrong_one():
    assert {check for check, _ in WRONG_FORM} == {*COURSE_CHECKS}
    assert {check for check, _ in SPOILED} == {*CHECKS}


def test_an_optional_section_is_not_counted():
    notebook = notebook_of_the_course()
    before = words(notebook)
    notebook.cells.insert(5, new_markdown_cell("## Optional: more\n" + "word " * MOST_WORDS))
    notebook.cells.insert(6, new_code_cell("pass\n" * MOST_CODE_LINES))
    check_length(notebook)
    assert words(notebook) == before


def test_a_cell_that_escapes_comparison_is_caught():
    for change in ({"metadata": {"tags": ["nbval-ignore-output"]}}, {"source": "# NBVAL_IGNORE_OUTPUT\nprint()"}):
        notebook = small_notebook()
        notebook.cells[1].update(nbformat.from_dict(change))
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
BAR_TEXT = "100% 3/3 [00:00<00:00, 2.9it/s]"  # as `normalize` stores it


def drawn(end, alt):
    """The output that a cell with this drawing stores."""
    space = {}
    exec(DRAWING.format(end=end), space)
    image = space["html_image"](space["figure"], alt)
    return new_output(
        "execute_result", data={"text/html": image._repr_html_(), "text/plain": repr(image)}, execution_count=1
    )


@pytest.fixture
def own_notebooks(tmp_path, monkeypatch):
    """A folder of notebooks in place of the course's, and one of claims, which `run_notebooks` uses."""
    notebooks, claims = tmp_path / "notebooks", tmp_path / "claims"
    notebooks.mkdir()
    claims.mkdir()
    monkeypatch.setattr(run_notebooks, "NOTEBOOKS", notebooks)
    monkeypatch.setattr(run_notebooks, "CLAIMS", claims)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return notebooks, claims


def outcomes(names, report):
    """Run notebooks as `course.py test` does: the outcome of each cell."""
    code = run_notebooks.main([*names, "-pno:cacheprovider", f"--junitxml={report}"])
    return code, ["failed" if list(item) else "passed" for item in ElementTree.parse(report).iter("testcase")]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_ships_is_what_is_tested_and_claims_are_appended(name, tmp_path):
    copy = tmp_path / f"{name}.ipynb"
    shutil.copy(FOLDER / copy.name, copy)
    run_notebooks.add_claims(copy, run_notebooks.CLAIMS / f"{name}.py")
    *cells, claims = nbformat.read(copy, as_version=4).cells
    assert cells == read(name).cells and "assert" in claims.source


def write_notebook(path, cells):
    """Write a notebook of (source, stored outputs)."""
    cells = [new_code_cell(source, execution_count=1, outputs=outputs) for source, outputs in cells]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=metadata), path)


@pytest.mark.long
@pytest.mark.slow
def test_nbval_compares_texts_and_alt_texts_but_no_pixels_and_claims_fail_their_notebook(tmp_path, own_notebooks):
    notebooks, claims = own_notebooks
    look = "from pathlib import Path\nx = 3\nprint(Path('../course.py').exists())"
    for name, claim in {"a": "print(x)\nassert x == 3", "b": "assert x == 4", "c": None}.items():
        write_notebook(notebooks / f"{name}.ipynb", [(look, [new_output("stream", text="True\n")])])
        if claim:
            (claims / f"{name}.py").write_text(claim)
    view = {"model_id": "0" * 32, "version_major": 2, "version_minor": 0}
    bar = new_output("display_data", data={"text/plain": BAR_TEXT, WIDGET_VIEW: view})
    good, other = "The line rises from 0 to 1", "The line falls from 0 to 1"
    picture = DRAWING.format(end=1) + f"html_image(figure, {good!r})"
    cells = {
        "the same text": ("print('hello')", [new_output("stream", text="hello\n")]),
        "another text": ("print('hello')", [new_output("stream", text="hallo\n")]),
        "no output stored": ("print('hello')", []),
        "the same picture": (picture, [drawn(1, good)]),
        "other pixels": (picture, [drawn(-1, good)]),
        "another alt": (picture, [drawn(1, other)]),
        "a bar": (BAR, [bar]),
    }
    assert drawn(1, good) != drawn(-1, good)
    write_notebook(notebooks / "small.ipynb", cells.values())
    before = sorted(REPOSITORY.iterdir())
    code, found = outcomes(["a", "b.ipynb", "small"], tmp_path / "report.xml")  # c is not asked for
    assert (code, found[:4]) == (1, ["passed", "passed", "passed", "failed"])
    assert dict(zip(cells, found[4:], strict=True)) == {
        "the same text": "passed",
        "another text": "failed",
        "no output stored": "failed",
        "the same picture": "passed",
        "other pixels": "passed",
        "another alt": "failed",
        "a bar": "passed",
    }
    assert sorted(REPOSITORY.iterdir()) == before


def test_a_stored_notebook_shows_pictures_and_bars_without_html_and_widgets():
    notebook = small_notebook()
    bar = notebook.metadata.widgets[WIDGET_STATE].state
    bar.box = {"model_name": "HBoxModel", "state": {"children": ["IPY_MODEL_abc", "IPY_MODEL_text"]}}
    bar.text = {"model_name": "HTMLModel", "state": {"value": " 3/3 [00:01&lt;00:00, 2.9it/s, reward=0.83]"}}
    notebook.cells[4].outputs[0].data[WIDGET_VIEW].model_id = "box"
    notebook.metadata.language_info.version = "3.11.7"
    run_notebooks.normalize(notebook)
    picture = notebook.cells[2].outputs[0]
    assert (
        picture.data["image/png"] == "iVBORw0KGgo=" and picture.metadata["image/png"].alt == "A line that rises from 0"
    )
    assert notebook.cells[4].outputs[0].data["text/plain"] == "3/3 [00:01<00:00, 2.9it/s, reward=0.83]"
    assert isinstance(bar.abc.state.value, float) and "version" not in notebook.metadata.language_info
    stored = notebook.metadata.widgets[WIDGET_STATE]["state"]["abc"]["state"]
    assert repr(stored["value"]) == repr(stored["max"]) == "3"
    CHECKS["pictures"](notebook)
    CHECKS["progress bars"](notebook)


def test_the_core_path_stays_short():
    core_path = [nbformat.read(path, as_version=4) for number in CORE_PATH for path in FOLDER.glob(f"{number}_*.ipynb")]
    assert len(core_path) == len(CORE_PATH) and sum(map(words, core_path)) <= 14_000
    assert max(map(words, core_path)) <= 1_700
    assert all(core(notebook) == notebook.cells for notebook in core_path), "what is optional is in an appendix"


def test_the_syllabus_names_headings_that_exist():
    page = (REPOSITORY / "docs" / "syllabus.md").read_text(encoding="utf-8")
    parts = re.findall(r"^\*\*\[.*\]\(\.\./notebooks/(\w+)\.ipynb\)\*\*.*\n\n((?:- .*\n)+)", page, re.MULTILINE)
    assert [name for name, _ in parts] == [path.stem for path in sorted(FOLDER.glob("[0-9]*.ipynb"))]
    for name, objectives in parts:
        text = "\n".join(cell.source for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells)
        for objective in objectives.splitlines():
            (places,) = re.findall(r"^[^(]*\((.*)\)(?: → .*)?$", re.sub(r"\[appendix.*?\)", "", objective))
            for place in places.split("; "):
                heading = f"{place.strip()} · " if place.strip().isdigit() else place.strip()
                assert f"# {heading}" in text, (name, place)
