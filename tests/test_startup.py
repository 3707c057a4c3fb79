"""Start-up measured in a fresh process, and what keeps it short: a light package and a policy that stays loaded."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo_edu
from grpo_edu.machine.startup import AFTERWARDS, PHASES, measure_process, startup_anatomy, startup_text
from grpo_edu.models import Session

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_phase_is_measured_in_a_fresh_process(policy_dir):
    seconds = startup_anatomy(policy_dir)
    assert tuple(seconds) == PHASES + AFTERWARDS
    assert all(value > 0 for value in seconds.values())
    assert seconds["import torch"] > 0.1  # in this process it would be 0: it is imported already
    shown = startup_text(seconds, "random").splitlines()
    assert len(shown) == 2 + len(PHASES) + len(AFTERWARDS) and "first step of random" in shown[0]


def test_a_failure_is_said_by_its_last_line():
    with pytest.raises(RuntimeError, match="failed: ValueError: no such model$"):
        measure_process([sys.executable, "-c", "raise ValueError('no such model')"])


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import grpo_edu", ("torch", "numpy", "transformers", "datasets", "matplotlib", "trl", "scipy")),
        ("import grpo_edu.cli.main", ("torch", "numpy", "transformers", "datasets", "matplotlib", "trl", "scipy")),
        ("import grpo_edu.trainer", ("transformers", "datasets", "matplotlib", "trl", "scipy", "pandas", "peft")),
        ("from grpo_edu import load_problems; load_problems('basic')", ("torch", "numpy", "datasets")),
        ("import grpo_edu.problems.files, grpo_edu.rewards", ("torch", "datasets", "trl")),
        ("import grpo_edu.machine.hardware", ("torch", "psutil", "transformers")),
    ],
)
def test_heavy_libraries_wait_until_they_are_used(code, absent):
    script = f"import sys; {code}; print(*sorted({set(absent)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert run.stdout.split() == []


@pytest.mark.long
def test_a_training_needs_no_library_of_the_other_backend(policy_dir):
    """A run of this package's trainer imports neither TRL nor datasets nor peft, which take seconds."""
    script = (
        "import sys; from grpo_edu import *; from grpo_edu.models import Session;"
        f"session = Session({str(policy_dir)!r}); config = GRPOConfig(prompts_per_step=2, max_completion_length=4);"
        "problems = load_problems('basic'); reward = lambda completions, **_: [float(len(c)) for c in completions];"
        "next(train(session.model, session.tokenizer, problems, reward, config));"
        "print(*sorted({'trl', 'datasets', 'pandas', 'peft', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert run.stdout.split() == []


def test_a_session_starts_every_run_from_the_weights_that_were_loaded(policy_dir):
    session = Session(policy_dir)
    loaded = {name: weight.clone() for name, weight in session.model.named_parameters()}
    model = session.model.train().requires_grad_(False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
            weight.grad = torch.ones_like(weight)
    again, tokenizer = session.reset()
    assert again is model and tokenizer is session.tokenizer and not again.training
    for name, weight in again.named_parameters():
        assert torch.equal(weight, loaded[name]) and weight.requires_grad and weight.grad is None


# The garbage collector waits while libraries are imported. In fresh interpreters, since a library is imported once.


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_collector_sleeps_while_torch_is_imported_and_wakes_after():
    code = """
import gc
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase) if phase == "start" else None)
import grpo_edu; grpo_edu.group_advantages
print(len(rounds), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""
    rounds, awake, set_aside = printed(code).split()
    assert int(rounds) < 50  # torch itself asks for a few; with the collector there are almost 400
    assert (awake, set_aside) == ("True", "True")


def test_a_collector_that_was_off_stays_off_and_few_modules_are_not_set_aside():
    code = """
import gc
gc.disable()
before = gc.get_freeze_count()  # from Python 3.12 on the interpreter sets some objects aside itself
import grpo_edu; grpo_edu.LEVELS
print(gc.isenabled(), gc.get_freeze_count() - before)
"""
    assert printed(code) == "False 0"


def test_the_collector_wakes_after_a_failed_import():
    with pytest.raises(ImportError), grpo_edu.gc_paused():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
