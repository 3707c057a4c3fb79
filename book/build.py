"""Build the course as a website: ``python3 course.py book`` calls this in .venv-book, see book/README.md.

Notebooks, exercises and documents are copied into a temporary folder and prepared there for reading in a browser: what
needs a kernel is replaced by what it showed. Then Jupyter Book makes the pages. Nothing is run or fetched.
"""

import argparse
import base64
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
WEB = ROOT / "grpo_edu" / "web"  # scripts and styles that the package's own pages use too
MODEL_CARD = "data/models/tiny/README.md"
# The documents in the order of the book, by reader; a document that is not named here comes last.
DOCUMENTS = {
    "For students": [
        "syllabus",
        "glossary",
        "dashboards",
        "your_own_task",
        "challenge",
        "troubleshooting",
        "comparison",
    ],
    "For instructors": ["teaching", "grading", "classroom"],
    "How we know": ["measured", "studies"],
    "Going further": ["cluster", "architecture", "contributing"],
}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
RUN = ROOT / "docs" / "images" / "dashboard_training.png"
RUN_ALT = "A finished run in the dashboard: settings, curves, accuracy before and after, and sampled completions"
PLAYED = re.compile(r"^!\[[^\]]*\]\(images/playground\.png\)", re.MULTILINE)
INSPECTED = re.compile(r"^!\[[^\]]*\]\(images/token_inspector\.png\)", re.MULTILINE)
PLAYABLE = ("03_policy_gradients", "04_group_advantages", "05_grpo_objective")  # notebooks about what it shows
EXPLORERS = {"AdvantageExplorer": "advantages", "ObjectiveExplorer": "objective"}
CURVES = ROOT / "data" / "curves"
REAL = "14_real_language_model"
HOW_TO_RUN = (
    "This page shows stored results. To run the notebook and train a model of your own, [start the course on your "
    "computer](../README.md#start)."
)
PLAYED_RUN = (
    "**Play the run.** This recording has the settings of the run above. Choose a held-out instruction, press *Play*, "
    "and watch which of the first answers become likelier and what replaces them."
)
INSPECTED_STEP = (
    "**Look at single tokens.** These are the tokens of one group in the third step of the recorded run. Choose one to "
    "see how strongly the update pushed it and what happened to it."
)
MATRIX = "model.layers.0.self_attn.k_proj.weight"  # the smallest of the tiny model: its numbers come into the page
ASKED = re.compile(r"^!\[[^\]]*\]\(docs/images/ask_the_model\.webp\)", re.MULTILINE)
FACTS = re.compile(r"^Study time ≈ .*$", re.MULTILINE)
# Code, in which nothing is a link, or else a link. Its label may hold a picture or code.
CODE = r"(?P<code>^```.*?^```|`[^`\n]*`)"
LINK = re.compile(
    r"(?P<image>!?)\[(?P<label>(?:[^\[\]]|\[[^\[\]]*\](?:\([^()]*\))?)*)\]"
    r"\(<?(?P<target>[^)\s>]+)>?(?P<title> \"[^\"]*\")?\)|" + CODE,
    re.DOTALL | re.MULTILINE,
)


# ---- the order of the pages ----


def contents():
    """Return the table of contents: each notebook with its exercises, in README's order, then the documents."""
    order = re.findall(r"\(notebooks/(\w+)\.ipynb\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    names.sort(key=lambda name: order.index(name) if name in order else len(order))
    course = []
    for name in names:
        entry = {"file": f"notebooks/{name}"}
        if (ROOT / "exercises" / f"{name}.ipynb").exists():
            entry["sections"] = [{"file": f"exercises/{name}"}]
        course.append(entry)
    numbered = [entry for entry in course if "/appendix" not in entry["file"]]
    appendices = [entry for entry in course if entry not in numbered]
    projects = [{"file": f"exercises/studies/{name}"} for name in ("study", "capstone")]
    parts = [part("The course", numbered), part("Appendices", appendices), part("Projects", projects)]
    left = {path.stem for path in (ROOT / "docs").glob("*.md")} - {
        name for names in DOCUMENTS.values() for name in names
    }
    for caption, names in DOCUMENTS.items():
        names = [name for name in names if (ROOT / "docs" / f"{name}.md").exists()]
        names += sorted(left) if caption == "Going further" else []
        entries = [{"file": f"docs/{name}"} for name in names]
        if caption == "How we know":
            entries.append({"file": MODEL_CARD.removesuffix(".md")})
        parts.append(part(caption, entries))
    return {"format": "jb-book", "root": "README", "parts": [one for one in parts if one["chapters"]]}


def part(caption, chapters):
    return {"caption": caption, "chapters": chapters}


def pages(toc):
    """Return the pages of a table of contents in their order, without endings."""
    found = [toc["root"]]
    for chapter in (chapter for one in toc["parts"] for chapter in one["chapters"]):
        found += [chapter["file"], *(section["file"] for section in chapter.get("sections", []))]
    return found


# ---- the text of a page ----


def prepare_text(text, page, files, repository, linked):
    """Markdown for the book: links that lead to a page or a file, and the facts of the first cell under its title.

    Args:
        page: the file of the page, relative to the root. files: those of all pages.
        repository: where links to other files lead; with "" such a file comes into the book.
        linked: a set that collects such files.
    """
    text = "\n\n".join(block for block in text.split("\n\n") if not block.startswith("Course map: "))
    facts = FACTS.search(text)
    if facts:
        text = FACTS.sub("", text).replace("\n", f"\n\n{facts_html(facts.group())}\n", 1)

    def new_link(found):
        if found["code"]:
            return found[0]
        label = LINK.sub(new_link, found["label"])
        there = target(found["target"], page, files, "" if found["image"] else repository, linked)
        return f"{found['image']}[{label}]({there}{found['title'] or ''})" if there else label

    return LINK.sub(new_link, text)


def facts_html(line):
    """Return the line "Study time ≈ 40 min · … · difficulty ●●○" as a row of labels."""
    labels = "".join(f"<span>{html.escape(fact.strip())}</span>" for fact in line.split("·"))
    return f'<p class="course-facts">{labels}</p>'


def exercise_facts(notebook):
    """Return the study time of an exercise page, summed over its questions ("*3 points · … · 10 minutes*")."""
    text = "\n".join(source(cell) for cell in notebook["cells"])
    found = re.findall(r"^\*(\d+) points? · difficulty ([●○]+) .*?(\d+) min(?:utes)?\*", text, re.MULTILINE)
    if not found:
        return ""
    hardest = max((difficulty for _, difficulty, _ in found), key=lambda dots: dots.count("●"))
    minutes, points = sum(int(row[2]) for row in found), sum(int(row[0]) for row in found)
    return f"Study time ≈ {minutes} min · {len(found)} exercises · {points} points · difficulty up to {hardest}"


def target(link, page, files, repository, linked):
    """Return where a link of a page leads in the book; None if it leads nowhere."""
    if re.match(r"[a-z]+:", link):
        return link
    path, _, anchor = link.partition("#")
    anchor = f"#{slug(anchor)}" if anchor else ""
    if not path:
        return anchor
    resolved = ((ROOT / page).parent / unquote(path)).resolve()
    name = resolved.relative_to(ROOT).as_posix()
    inside = [file for file in files if file.startswith(f"{name}/")]
    if name in files or "images/" in name:
        return path + anchor
    if inside:  # a folder: its first page
        return "../" * page.count("/") + inside[0]
    if repository:
        return f"{repository}/{name}"
    if resolved.is_dir() or (resolved.is_file() and resolved.suffix in (".md", ".ipynb")):
        return None  # a page that is not in the book, such as a solution
    if resolved.is_file():
        linked.add(name)
    return path  # if there is no such file, Jupyter Book says so


def slug(anchor):
    """Return the anchor of a heading in the book, from the one that JupyterLab or a code-hosting site gives it.

    >>> slug("7-·-The-whole-step"), slug("what-they-cost")
    ('7--the-whole-step', 'what-they-cost')
    """
    return re.sub(r"[^\w-]", "", unquote(anchor).lower())


# ---- the outputs of a notebook ----


def source(cell):
    return "".join(cell["source"])


def prepare_notebook(notebook, page, files, repository, linked):
    """Replace what needs a kernel with what it showed: bars at their end, dashboards as pictures or as JavaScript."""
    state = notebook["metadata"].pop("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = prepare_text(source(cell), page, files, repository, linked) + embedded(page, source(cell))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            view = data.pop(WIDGET_VIEW, None)
            if "text/html" in data:
                data["text/html"] = prepare_html("".join(data["text/html"]), source(cell))
                data.pop("image/png", None)
                data.pop("image/svg+xml", None)
            elif view:
                data["text/plain"] = bar_text(state, view["model_id"]) or data["text/plain"]
    first = notebook["cells"][0]
    facts = exercise_facts(notebook) if page.startswith("exercises/") else ""
    if facts and first["cell_type"] == "markdown":
        first["source"] = first["source"].replace("\n", f"\n\n{facts_html(facts)}\n", 1)
    if page.startswith("notebooks/"):
        first["source"] += f"\n\n{HOW_TO_RUN}"
    if page.startswith("notebooks/") and Path(page).stem in PLAYABLE:
        link = "\n\n[The playground](../docs/dashboards.md#the-playground) shows this with a small policy.\n\n"
        summary = "Try it without Python: a small policy that learns in this page"
        first["source"] += f"\n\n<details><summary>{summary}</summary>\n{playground(link)}\n</details>"


def prepare_html(page, code):
    """Return what a cell's output showed; an explorer's picture makes room for the live one where JavaScript runs."""
    for name, kind in EXPLORERS.items():
        if f"\n{name}(" in code:
            return f'<div class="course-explorer" data-explorer="{kind}">{page}</div>'
        if f"{name}(" in code:
            return f'{page}<div class="course-explorer" data-explorer="{kind}"></div>'
    if "AskTheModel(" in code:
        return recorded(page)
    if "TokenInspector(" in code:
        return inspected(page)
    if "TrainingDashboard(" in code and "<img" not in page:
        page = f'<img alt="{RUN_ALT}" src="data:image/png;base64,{base64.b64encode(RUN.read_bytes()).decode()}">{page}'
    for name, (kind, recording) in RECORDINGS.items():
        if f"{name}(" in code:
            live = from_recording(kind, recording(), page if f"\n{name}(" in code else "")
            return live if f"\n{name}(" in code else page + live
    return page


def weight_matrix():
    """Return a weight of the tiny model, whose file holds little-endian float32 numbers after a header in JSON."""
    stored = (ROOT / "data" / "models" / "tiny" / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    about = json.loads(stored[8:start])[MATRIX]
    first, last = about["data_offsets"]
    numbers = base64.b64encode(stored[start + first : start + last]).decode()
    return json.dumps({"name": MATRIX.removesuffix(".weight"), "shape": about["shape"], "weights": numbers})


def compact(recording):
    """JSON as the value of an attribute in single quotes, in which its double quotes stay as they are: small pages."""
    text = json.dumps(recording, ensure_ascii=False, separators=(",", ":"))
    return html.escape(text, quote=False).replace("'", "&#39;")


def stored_curves(name):
    return (CURVES / name).read_text(encoding="utf-8").strip()


RECORDINGS = {  # dashboard: (its name in recorded.js, what it shows)
    "RewardLab": ("rewards", lambda: stored_curves("exploits.json")),
    "QuantizationExplorer": ("quantization", weight_matrix),
    "ForgettingDashboard": ("forgetting", lambda: stored_curves("curriculum.json")),
    "TrainingDashboard": ("run", lambda: stored_curves("dashboard_run.json")),
}


def embedded(page, text):
    """Return the live dashboard that a section shows although its notebook has none; "" for other sections."""
    if page == "notebooks/06_losses.ipynb" and text.startswith("## 3 "):
        return '\n\n<div class="course-explorer" data-explorer="objective"></div>'
    if page == "notebooks/10_ewc_progressive_training.ipynb" and text.startswith("## 1 "):
        kind, recording = RECORDINGS["ForgettingDashboard"]
        return f"\n\n{from_recording(kind, recording(), '')}"
    if page == f"notebooks/{REAL}.ipynb" and text.startswith("In the dashboard you ask the model yourself"):
        stored = compact(json.loads(stored_curves("ask_smollm2.json")))
        return f"\n\n<div class='course-explorer' data-explorer='looks' data-recording='{stored}'></div>"
    if page == f"notebooks/{REAL}.ipynb" and text.startswith("*Obeys* rises, and"):  # after what readers predict
        played = from_recording("run", stored_curves("smollm2_run.json"), "")
        return f"\n\n{PLAYED_RUN}\n\n{played}\n\n{INSPECTED_STEP}\n\n{inspected('', 'tokens_smollm2.json')}"
    return ""


def from_recording(kind, recording, fallback):
    """Return a dashboard on stored numbers, or the fallback where no JavaScript runs."""
    stored = compact(json.loads(recording))
    return f"<div class='course-explorer' data-recorded='{kind}' data-recording='{stored}'>{fallback}</div>"


def with_explorers(text):
    """Return the document on the dashboards, with the two that run in the book."""
    call = "AdvantageExplorer(num_generations=8)\n```\n"
    live = "".join(f'\n<div class="course-explorer" data-explorer="{kind}"></div>\n' for kind in EXPLORERS.values())
    return text.replace(call, call + live)


def recorded(fallback):
    """Return the recorded answers of "Ask the model", step by step, or the fallback where no JavaScript runs."""
    stored = compact(json.loads(stored_curves("ask_the_model.json")))
    return f"<div class='course-explorer' data-explorer='ask' data-recording='{stored}'>{fallback}</div>"


def inspected(fallback, recording="tokens.json"):
    """Return the token inspector with a recorded step, or the fallback where no JavaScript runs."""
    record = compact(json.loads(stored_curves(recording))["record"])
    return f"<div class='course-explorer'><div data-tokens='{record}'>{fallback}</div></div>"


def playground(fallback):
    """Return the policy that trains in the page, or the fallback where no JavaScript runs."""
    return f'<div class="course-explorer" data-playground>{fallback}</div>'


def bar_text(state, model):
    """Return the text of a stored progress bar when it had ended, such as "100% 20/20 [00:12<00:00, reward=0.83]"."""
    children = state.get(model, {}).get("state", {}).get("children", [])
    values = [state[child.removeprefix("IPY_MODEL_")]["state"].get("value") for child in children]
    return " ".join(html.unescape(value).strip() for value in values if isinstance(value, str))


# ---- the book ----


def prepare(folder, config):
    """Fill a folder with the pages and Jupyter Book's settings."""
    toc = contents()
    names = [f"{page}{ending}" for page in pages(toc) for ending in (".md", ".ipynb")]
    files = [name for name in names if (ROOT / name).exists()]
    url, branch = config["repository"]["url"], config["repository"]["branch"]
    repository = f"{url}/blob/{branch}" if url else ""
    for name in files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text(encoding="utf-8")
        linked = set()
        if name.endswith(".md"):
            text = with_explorers(prepare_text(text, name, files, repository, linked))
            text = ASKED.sub(lambda picture: recorded(f"\n\n{picture[0]}\n\n"), text)
            text = INSPECTED.sub(lambda picture: inspected(f"\n\n{picture[0]}\n\n"), text)
            text = PLAYED.sub(lambda picture: playground(f"\n\n{picture[0]}\n\n"), text)
            if name == "README.md":  # the book begins with it
                title, about, rest = text.split("\n\n", 2)
                blocks = [block for block in rest.split("\n\n") if "web book" not in block[:20]]  # this is it
                text = "\n\n".join([title, about, playground(""), *blocks])
                text = text.replace("Clone this repository", f"Clone [this repository]({url})") if url else text
        else:
            notebook = json.loads(text)
            prepare_notebook(notebook, name, files, repository, linked)
            text = json.dumps(notebook)
        place.write_text(text, encoding="utf-8")
        for path in linked:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
    if not url:
        del config["launch_buttons"]
        config["html"]["use_repository_button"] = False
    for images in ("notebooks/images", "docs/images"):
        shutil.copytree(ROOT / images, folder / images)
    (folder / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "_toc.yml").write_text(yaml.safe_dump(toc, sort_keys=False), encoding="utf-8")
    shutil.copytree(HERE / "static", folder / "assets")  # what _config.yml names, Jupyter Book loads on every page
    for name in ("chances.css", "chances.js", "formulas.js", "hover.js", "inspector.css", "inspector.js"):
        shutil.copy(WEB / name, folder / "assets")
    copy_mathjax(folder / "assets" / "mathjax")


def copy_mathjax(folder):
    """MathJax for TeX with its fonts: 2 of the 24 MB that the package brings."""
    package = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent / "static" / "mathjax"
    folder.mkdir()
    shutil.copy(package / "tex-chtml.js", folder)
    shutil.copytree(package / "output" / "chtml" / "fonts", folder / "output" / "chtml" / "fonts")


def build(output, config):
    """Make the pages in `output`; returns Jupyter Book's exit code."""
    with tempfile.TemporaryDirectory(prefix="grpo-edu-book-") as folder:
        pages_folder, made = Path(folder) / "pages", Path(folder) / "made"
        pages_folder.mkdir()
        prepare(pages_folder, config)
        command = [
            sys.executable,
            "-c",
            "from jupyter_book.cli.main import main; main()",
            "build",
            "--quiet",
            "--warningiserror",
            "--keep-going",
        ]
        code = subprocess.call([*command, f"--path-output={made}", str(pages_folder)], stdout=subprocess.DEVNULL)
        if code == 0:
            for notebook in (made / "_build" / "html" / "_sources").rglob("*.ipynb"):  # what the download button gives
                shutil.copy(ROOT / notebook.relative_to(made / "_build" / "html" / "_sources"), notebook)
            shutil.rmtree(output, ignore_errors=True)
            shutil.move(made / "_build" / "html", output)
    return code


def main():
    parser = argparse.ArgumentParser(description="Build the course as a website, without a network.")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "book", metavar="DIR", help="where it goes")
    parser.add_argument("--repository", metavar="URL", help="instead of the address in book/_config.yml")
    arguments = parser.parse_args()
    config = yaml.safe_load((HERE / "_config.yml").read_text(encoding="utf-8"))
    if arguments.repository is not None:
        config["repository"]["url"] = arguments.repository.rstrip("/")
    start = time.monotonic()
    code = build(arguments.output, config)
    if code == 0:
        found = [path.stat().st_size for path in arguments.output.rglob("*.html")]
        total = sum(path.stat().st_size for path in arguments.output.rglob("*") if path.is_file())
        size = f"{sum(found) / len(found) / 1000:.0f} kB each on average, {total / 1e6:.0f} MB in all"
        print(f"{len(found)} pages, {size}, in {time.monotonic() - start:.0f} s: {arguments.output / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
