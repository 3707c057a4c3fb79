"""Imports with the collector paused: in fresh interpreters, since a library is imported once."""

import subprocess
import sys

import pytest


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_collector_sleeps_while_torch_is_imported_and_wakes_after():
    code = """
import gc
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase) if phase == "start" else None)
{load}
print(len(rounds), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    plain, awake, frozen = printed(code.format(load="import torch")).split()
    paused, awake_again, set_aside = printed(code.format(load="import grpo_edu; grpo_edu.group_advantages")).split()
    assert int(paused) < int(plain) / 5  # torch itself asks for a few
    assert (awake, frozen) == ("True", "False") and (awake_again, set_aside) == ("True", "True")


def test_a_collector_that_was_off_stays_off():
    code = """
import gc
gc.disable()
before = gc.get_freeze_count()  # from Python 3.12 on the interpreter sets some objects aside itself
import grpo_edu; grpo_edu.LEVELS
print(gc.isenabled(), gc.get_freeze_count() - before)
"""
    assert printed(code) == "False 0"  # few modules came: nothing is set aside


def test_it_wakes_after_a_failure():
    code = """
import gc
from grpo_edu.heavy_imports import collector_paused
try:
    with collector_paused():
        import no_such_module
except ImportError:
    print(gc.isenabled())
"""
    assert printed(code) == "True"


@pytest.mark.parametrize("name", ["group_advantages", "load_policy"])
def test_names_are_what_their_modules_hold(name):
    import grpo_edu

    assert getattr(grpo_edu, name).__module__.startswith("grpo_edu.")
