"""The pages next to the notebooks: their links lead somewhere, and what they name exists."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "book" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "benchmarks").rglob("*.md")),
    *sorted((REPOSITORY / "data").rglob("README.md")),
]
# Symptoms that a page quotes and that other programs print.
MESSAGES_OF_OTHERS = {
    *("externally-managed-environment", "nvidia", "Error displaying widget", "ModuleNotFoundError: grpo_edu"),
    *("Invalid generic resource (gres) specification", "(Resources)", "(Priority)", "DUE TO TIME LIMIT", "oom-kill"),
    *("CUDA out of memory", "address already in use", "ChildFailedError", "DeepSpeed is not available"),
}


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+?)\s*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if re.match(r"[a-z]+:", link):
            assert link.startswith("https://"), link
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(REPOSITORY), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_picture_has_an_alternative_text(page):
    for alt in re.findall(r"!\[([^\]]*)\]", page.read_text(encoding="utf-8")):
        assert len(alt.split()) >= 4, alt


def printed_texts() -> list[str]:
    """Return the texts in the source of the course, with `*` for each value that is filled in."""
    folders = (REPOSITORY / "grpo_edu", REPOSITORY / "classroom")
    files = [REPOSITORY / "course.py", *(path for folder in folders for path in folder.rglob("*.py"))]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [without_values(text) for text in found]


def without_values(text: str) -> str:
    """Replace quoted names and numbers, which a message fills in.

    >>> without_values("this is Python 3.10: 'tiny'"), without_values("this is Python *.*: *")
    ('this is Python *: *', 'this is Python *: *')
    """
    return re.sub(r"\*(?:\.\*)+", "*", re.sub(r"'[^']*'|\d+(?:\.\d+)*", "*", text))


def test_every_message_that_a_page_quotes_exists():
    """The first column of tables of symptoms, and the sentences in quotation marks of troubleshooting."""
    quoted = set()
    for name in ("troubleshooting", "cluster"):
        page = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for table in re.findall(r"^\| (?:symptom|you see) \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE):
            quoted |= {text for row in table.splitlines() for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])}
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted |= set(re.findall(r'"([A-Z][^"]+\.)"', page.replace("\n", " ")))
    assert len(quoted) > 20
    texts = printed_texts()
    missing = {text for text in quoted if not any(without_values(text.rstrip(" …")) in printed for printed in texts)}
    assert missing == MESSAGES_OF_OTHERS


def test_every_module_that_a_page_names_exists():
    """`python -m benchmarks.NAME` and `python -m grpo_edu.NAME` in README and docs."""
    named = {name for page in PAGES for name in re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    for name in named - {"pytest"}:
        path = REPOSITORY.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_the_pages_of_the_code_name_what_is_there():
    """The modules of the spine, every room, and files by their paths."""
    page, guide = (
        (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("architecture", "contributing")
    )
    package = REPOSITORY / "grpo_edu"
    for name in re.findall(r"^\| .* \| `(\w+\.py)` \|", page, re.MULTILINE):
        assert (package / name).is_file(), name
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} | {"classroom/"}
    assert set(re.findall(r"^\| `(\w+/)` \|", page, re.MULTILINE)) == rooms
    for path in re.findall(r"`((?:grpo_edu|tests|benchmarks|data|recipes|solutions)/[\w./]*)`", page + guide):
        assert (REPOSITORY / path).exists(), path


def test_the_spelling_is_right():
    """codespell over every text of the repository that people read."""
    import codespell_lib as codespell

    folders = ("grpo_edu", "notebooks", "solutions", "exercises", "docs", "tests", "benchmarks", "recipes")
    places = [str(REPOSITORY / name) for name in (*folders, "README.md", "course.py")]
    skipped = "*.json,*.jsonl,*.safetensors,*.png"
    words = "ines,wither,trian,anwser,nd,ist,ans,notin"  # names, short names, and typing errors that tests make
    assert (
        codespell.main(
            "--skip",
            skipped,
            "--ignore-words-list",
            words,
            "--ignore-regex",
            "[A-Za-z0-9+/=]{60,}",
            "--quiet-level",
            "3",
            *places,
        )
        == 0
    )


def test_the_changelog_says_each_thing_once():
    """When branches were merged, lines that both had changed were there twice."""
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in text.split("\n## "):
        headings = re.findall(r"^- (\*\*.+?\*\*)", version, re.MULTILINE)
        assert len(headings) == len(set(headings)), [one for one in headings if headings.count(one) > 1]


def test_conda_asks_for_what_the_package_asks_for():
    """environment.yml has pyproject's ranges under conda-forge's names; TRL comes with the package, by pip."""
    environment = (REPOSITORY / "environment.yml").read_text(encoding="utf-8")
    of_conda = set(re.findall(r"^  - ([a-z].*\d.*)$", environment, re.MULTILINE))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    renamed = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}
    asked = {re.sub(r"^\w+", lambda name: renamed.get(name[0], name[0]), line) for line in project["dependencies"]}
    (python,) = (line.partition("=")[2] for line in of_conda if line.startswith("python="))
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    assert of_conda - {f"python={python}"} == asked - {"trl>=1.16,<2"}


def test_the_badges_lead_to_files_that_exist():
    """Codespaces, Binder and Colab in the instructors' guide: the addresses, without the host and OWNER/REPOSITORY."""
    guide = (REPOSITORY / "docs" / "teaching.md").read_text(encoding="utf-8")
    opened = re.findall(r"\]\(https://\S+(?:urlpath=lab/tree/|/blob/main/)(\S+?)\)", guide)
    assert len(opened) == 2 and all((REPOSITORY / path).is_file() for path in opened)
    container = json.loads((REPOSITORY / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (REPOSITORY / container["postCreateCommand"].split()[1]).is_file()
