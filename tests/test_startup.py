"""Start-up measured in a fresh process, and what keeps it short: a light package and a policy that stays loaded."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_edu.session import Session
from grpo_edu.startup import AFTERWARDS, PHASES, startup_anatomy, startup_text

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_phase_is_measured_in_a_fresh_process(policy_dir):
    seconds = startup_anatomy(policy_dir)
    assert tuple(seconds) == PHASES + AFTERWARDS
    assert all(value > 0 for value in seconds.values())
    assert seconds["import torch"] > 0.1  # in this process it would be 0: it is imported already
    shown = startup_text(seconds, "random").splitlines()
    assert len(shown) == 2 + len(PHASES) + len(AFTERWARDS) and "first step of random" in shown[0]


def test_text_by_hand():
    seconds = {"python": 0.1, "import torch": 1.0, "import transformers": 0.5, "problems": 0.1, "model": 0.3,
               "first step": 0.5, "second step": 0.4, "run again": 0.45}  # fmt: skip
    lines = startup_text(seconds).splitlines()
    assert lines[2].split() == ["import", "torch", "1.00", "s", "40%"]
    assert lines[7].split() == ["total", "2.50", "s"]
    assert lines[9].split()[:4] == ["run", "again", "0.45", "s"]


def test_a_failure_is_said_by_its_last_line(tmp_path):
    with pytest.raises(RuntimeError, match="startup nothing-here failed: ValueError: name: 'nothing-here' is unknown"):
        startup_anatomy("nothing-here")


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import grpo_edu", ("torch", "numpy", "transformers", "datasets", "matplotlib", "trl", "scipy")),
        ("import grpo_edu.cli", ("torch", "numpy", "transformers", "datasets", "matplotlib", "trl", "scipy")),
        ("import grpo_edu.trainer", ("transformers", "datasets", "matplotlib", "trl", "scipy", "pandas", "peft")),
        ("from grpo_edu import load_problems; load_problems('basic')", ("torch", "numpy", "datasets")),
    ],
)
def test_heavy_libraries_wait_until_they_are_used(code, absent):
    script = f"import sys; {code}; print(*sorted({set(absent)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert run.stdout.split() == []


def test_a_training_needs_no_library_of_the_other_backend(policy_dir):
    """A run of this package's trainer imports neither TRL nor datasets nor peft, which take seconds."""
    script = (
        "import sys; from grpo_edu import *; from grpo_edu.session import Session;"
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
