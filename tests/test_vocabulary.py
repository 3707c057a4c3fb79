"""One word for one thing: what docs/glossary.md says is what package, command line, notebooks and pages say."""

import ast
import inspect
import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch
from toy_policy import PROBLEMS, SMALL, late_letters, make_model, word_tokenizer

import grpo_edu
from grpo_edu.cli.main import build_parser
from grpo_edu.config import GRPOConfig
from grpo_edu.continual.ewc import Anchor, anchor_penalty, copy_params, uniform_fisher
from grpo_edu.trainer import train

REPOSITORY = Path(__file__).resolve().parents[1]
GLOSSARY = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
TABLE = [[cell.strip() for cell in line.strip("|").split("|")] for line in GLOSSARY.splitlines() if line[:1] == "|"]
WORDS = [row for row in TABLE if len(row) == 5 and row[0] != "word" and row[0].strip("-")]
METRICS = [key for row in TABLE if len(row) == 2 for key in re.findall(r"`([^`]+)`", row[0])]
NAMES = [name for row in WORDS for name in re.findall(r"`([^`]+)`", row[2])]
NOT_NAMES = {name for row in WORDS for name in re.findall(r"`([^`]+)`", row[4])}
NOT_WORDS = {word.strip() for row in WORDS for word in re.sub(r"`[^`]+`", "", row[4]).split(",")} - {""}
SHORTENED = {"old_logps", "ref_logps", "sampling_logps"}  # a name may be shorter where it is local, not for a caller
SHOWN = {"minimal.Group"}  # one file with the notation of notebook 05

# where a word that is not ours is another's: (page or notebook, word), each with its reason
QUOTED = {
    ("comparison.md", "agents"),  # of TRL, which trains language models that call tools
    ("16_several_turns.ipynb", "trajectory"),  # credit by trajectory, as papers call it
    ("16_several_turns.ipynb", "environment_factory"),  # of TRL, whose trainer takes our environments
}


def commands():
    (action,) = (action for action in build_parser()._actions if action.choices)
    return action.choices


def texts() -> dict[str, str]:
    """What people read: the pages, and the source of all cells."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "data").rglob("README.md")]
    found = {str(page): page.read_text(encoding="utf-8") for page in pages if page.name != "glossary.md"}
    for folder in ("notebooks", "solutions"):
        for path in (REPOSITORY / folder).glob("*.ipynb"):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            found[f"{folder}/{path.name}"] = "\n".join("".join(cell["source"]) for cell in cells)
    return found


def public_names() -> dict[str, set[str]]:
    """Arguments of public functions and methods, and fields of public classes: name → where."""
    found: dict[str, set[str]] = {}

    def look(body: list[ast.stmt], where: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__init__"):
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    found.setdefault(argument.arg, set()).add(f"{where}.{node.name}")
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        found.setdefault(field.target.id, set()).add(f"{where}.{node.name}")
                look(node.body, f"{where}.{node.name}")

    for path in (REPOSITORY / "grpo_edu").rglob("*.py"):
        look(ast.parse(path.read_text(encoding="utf-8")).body, path.stem)
    return found


def test_the_glossary_has_its_parts():
    assert len(WORDS) >= 50 and len(METRICS) >= 25 and len(NOT_NAMES) >= 40
    assert len(NOT_WORDS) >= 5 and len({row[0] for row in WORDS}) == len(WORDS) and len(set(METRICS)) == len(METRICS)
    assert all(row[1] and row[2] and "](" in row[3] for row in WORDS)  # a meaning, a name, a source


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_every_name_in_code_exists(name):
    if name.startswith("--"):
        assert any(name in command._option_string_actions for command in commands().values())
        return
    path, _, argument = name.rstrip(")").partition("(")
    value: object = grpo_edu
    for part in path.removeprefix("grpo_edu.").split("."):
        if inspect.ismodule(value) and not hasattr(value, part):
            value = import_module(f"{value.__name__}.{part}")
            continue
        known = {field.name for field in fields(value)} if hasattr(value, "__dataclass_fields__") else set()
        value = None if part in known else getattr(value, part)
    assert not argument or argument in inspect.signature(value).parameters


def test_no_argument_and_no_field_has_another_name():
    names = public_names()
    assert len(names) > 400
    assert not {name: names[name] for name in NOT_NAMES | NOT_WORDS | SHORTENED if names.get(name, set()) - SHOWN}


def test_every_setting_is_an_option_of_the_same_name():
    known = set(commands()["train"]._option_string_actions)
    assert {"--" + field.name.replace("_", "-") for field in fields(GRPOConfig)} <= known


def test_no_option_has_another_name():
    options = {
        flag.lstrip("-").replace("-", "_") for command in commands().values() for flag in command._option_string_actions
    }
    assert len(options) > 60 and not options & (NOT_NAMES | NOT_WORDS)


def test_no_page_and_no_notebook_says_it_otherwise():
    plurals = (f"{word.removesuffix('y')}(?:y|ies)" if word.endswith("y") else f"{word}s?" for word in NOT_WORDS)
    pattern = re.compile(rf"\b(?:{'|'.join((*map(re.escape, NOT_NAMES), *plurals))})\b", re.IGNORECASE)
    found = {(place.split("/")[-1], word) for place, text in texts().items() for word in pattern.findall(text)}
    assert found == QUOTED


def test_the_metrics_of_a_step_are_those_of_the_glossary():
    seen: set[str] = set()
    cases = (
        {"beta": 0.1, "rollout_quantization": "int8-weight", "max_resamples": 1},
        {"loss_type": "cispo", "epsilon_high": 5.0},
    )
    for case in cases:
        model = make_model(dtype=torch.float32)
        penalty = anchor_penalty([Anchor(uniform_fisher(model), copy_params(model))], ewc_lambda=1.0)
        config = GRPOConfig(**{**SMALL, "max_steps": 1, **case})
        (metrics,) = train(model, word_tokenizer(), PROBLEMS, late_letters, config, penalty=penalty)
        seen |= set(metrics)
    assert {key.replace("/late_letters/", "/{name}/") for key in seen} == set(METRICS)
