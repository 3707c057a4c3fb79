"""The package as an import: cheap, without torch, every public name in its place."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import grpo_edu

HEAVY = {"torch", "transformers", "datasets", "trl", "matplotlib", "scipy", "pandas", "IPython", "ipywidgets"}


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_the_package_is_cheap_and_loads_nothing_heavy():
    code = (
        "import sys, time; start = time.process_time(); import grpo_edu; dir(grpo_edu);"
        "print(time.process_time() - start, *sys.modules)"
    )
    runs = [python(code).split() for _ in range(3)]
    assert min(float(run[0]) for run in runs) < 0.3
    assert not HEAVY & {name.partition(".")[0] for name in runs[0][1:]}


def test_settings_problems_and_help_come_without_torch():
    code = (
        "import sys; from grpo_edu import GRPOConfig, Problem, accuracy_reward, extract_answer, load_problems;"
        "GRPOConfig(); load_problems('basic'); from grpo_edu.cli.main import build_parser;"
        "build_parser().format_help(); print(*sys.modules)"
    )
    assert not HEAVY & {name.partition(".")[0] for name in python(code).split()}


@pytest.mark.parametrize("name", [name for name in grpo_edu.__all__ if name != "__version__"])
def test_every_public_name_resolves(name):
    value = getattr(grpo_edu, name)
    home = import_module(f"grpo_edu.{grpo_edu._HOMES[name]}")
    assert value is getattr(home, name)
    # functions and classes are named where they are made, so that a traceback and a search lead there
    assert getattr(value, "__module__", home.__name__).startswith("grpo_edu.")


def test_public_names_are_listed_once_and_nothing_else_is_found():
    assert len(set(grpo_edu.__all__)) == len(grpo_edu.__all__)
    assert set(grpo_edu.__all__) == set(dir(grpo_edu))
    with pytest.raises(AttributeError, match="module 'grpo_edu' has no attribute 'train_model'"):
        _ = grpo_edu.train_model
    with pytest.raises(ImportError):
        from grpo_edu import train_model  # noqa: F401


@pytest.mark.slow
def test_the_lines_of_a_page_train_from_a_list_of_dictionaries_to_a_table(capsys):
    page = (Path(__file__).parents[1] / "docs" / "your_own_task.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(import grpo_edu.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 20
    exec(code, {})
    *steps, before, after, change = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in steps] == [str(step) for step in range(1, 11)]
    assert re.match(r"\d+ of 20 solved: .*, mean reward 0\.\d+", before) and "mean reward" in after
    assert re.match(r"[\d.]+% to [\d.]+%: .*; reward [+-]", change)


def test_a_figure_shows_itself_in_a_notebook():
    from IPython.core.formatters import DisplayFormatter

    figure = grpo_edu.training_curves([{"reward": 0.5}, {"reward": 0.7}])
    shown, _ = DisplayFormatter().format(figure)
    assert shown["image/png"].startswith(b"\x89PNG")
