"""The pages beside the notebooks: their links lead somewhere, and what they name exists."""

import json
import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [
    REPOSITORY / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
    *sorted((REPOSITORY / "benchmarks" / "studies").glob("*.md")),
    *sorted((REPOSITORY / "data").rglob("README.md")),
]


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


def test_every_module_that_a_page_names_exists():
    """`python -m benchmarks.NAME` and `python -m grpo_edu.NAME` in README and docs."""
    named = {name for page in PAGES for name in re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8"))}
    assert len(named) > 5
    for name in named - {"pytest"}:
        path = REPOSITORY.joinpath(*name.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


def test_the_contributors_page_names_what_is_there():
    """The modules of the spine, every room, and files by their paths."""
    page = (REPOSITORY / "docs" / "contributing.md").read_text(encoding="utf-8")
    package = REPOSITORY / "grpo_edu"
    for name in re.findall(r"^\| .* \| `(\w+\.py)` \|", page, re.MULTILINE):
        assert (package / name).is_file(), name
    rooms = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()} | {"classroom/"}
    assert set(re.findall(r"^\| `(\w+/)` \|", page, re.MULTILINE)) == rooms
    for path in re.findall(r"`((?:grpo_edu|tests|benchmarks|data|recipes|solutions)/[\w./]*)`", page):
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
