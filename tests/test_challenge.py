"""The challenge: what a submission gets for an honest run, what is refused, and what the judge writes."""

import json
import os
import re
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch

from classroom import challenge
from classroom.challenge import BUDGETS, Entry, Judge, Rules, leaderboard_page, phases_of, rank, read_submission
from grpo_edu.cli.main import main

needs_isolation = pytest.mark.usefixtures("isolation")
REPOSITORY = Path(__file__).resolve().parents[1]
RULES = Rules(budget=1500, seeds=1, num_train=30, num_heldout=9)
SETTINGS = """
from grpo_edu import accuracy_reward
rewards = [accuracy_reward]
def settings(start):
    return {"prompts_per_step": 4, "num_generations": 4, "learning_rate": 1e-3}
"""
NOTE = "I tried this because of that, and it was better than what I had before, as the three runs below show. " * 2


@pytest.fixture(scope="module")
def judge():
    return Judge("halfway", RULES, 3, isolated=True)


@pytest.fixture
def submit(tmp_path):
    """Write a submission of settings that are right and this code; returns its folder."""

    def write(code="", note=NOTE, name="ana"):
        folder = tmp_path / "submissions" / name
        folder.mkdir(parents=True)
        (folder / "submission.py").write_text(SETTINGS + code)
        (folder / "note.md").write_text(note)
        return folder

    return write


def weights(judge):
    return torch.cat([one.detach().flatten() for one in judge.session.model.parameters()])


@needs_isolation
@pytest.mark.long
def test_own_functions_that_do_the_same_give_the_same_weights(judge, submit):
    plain = judge.judge("plain", submit(name="plain"))
    after = weights(judge)
    start = weights(judge) if judge.session.reset() else None
    # Either function alone would train in the opposite direction.
    own = """
from grpo_edu.advantages import group_advantages
from grpo_edu.losses import per_token_loss
def advantages(rewards, num_generations):
    return -group_advantages(rewards, num_generations)
def loss(logps, old_logps, advantages, mask, **settings):
    return per_token_loss(logps, old_logps, -advantages, mask, **settings)
"""
    same = judge.judge("own", submit(own, name="own"))
    assert not plain.rejected and not same.rejected, (plain, same)
    assert 0 < plain.tokens[0] <= RULES.budget and plain.tokens == same.tokens
    assert not torch.equal(after, start)
    assert (weights(judge) - after).norm() < 0.02 * (after - start).norm()


# code that breaks a rule → what the message must contain
ATTACKS = {
    "load the model": ("from grpo_edu import load_policy\nload_policy('tiny')", ["model", "outside training"]),
    "read its weights": (
        "from grpo_edu.problems.templates import data_dir\ntry:\n"
        "    open(data_dir() / 'models' / 'halfway' / 'model.safetensors', 'rb')\nexcept OSError:\n    pass",
        ["model", "outside training", "safetensors"],
    ),
    "read held-out problems": (
        "from grpo_edu.problems.files import load_problems\ntry:\n    load_problems('basic', 'heldout')\n"
        "except Exception:\n    pass",
        ["held-out problems", "basic_heldout"],
    ),
    "sample more": (
        "def settings(start):\n    return {'max_steps': 999, 'prompts_per_step': 4}",
        ["1,500", "max_steps"],
    ),
    "one step too large": ("def settings(start):\n    return {'prompts_per_step': 30}", ["1,500", "step 1"]),
    "change the count": (
        "from classroom import challenge, sandbox\nimport grpo_edu.rollout\n"
        "challenge.Rules.budget = 10**9\nchallenge.CountingSampler.generate = None\n"
        "def settings(start):\n    return {'max_steps': 999, 'prompts_per_step': 4}",
        ["exceeds the budget of 1,500"],
    ),
    "diverge": (
        "def settings(start):\n    return {'learning_rate': 1e9, 'prompts_per_step': 4, 'max_grad_norm': 0.0}",
        ["diverged"],
    ),
    "not settings": ("def settings(start):\n    return 1", ["settings(start)", "dict"]),
    "leave": ("import os\nprint('good bye', flush=True)\nos._exit(0)", ["process ended", "good bye"]),
    "raise": ("x = 1\nraise KeyError('word')", ["KeyError", "word", "line 7"]),
    "wait": ("import time\ntime.sleep(99)", ["did not answer", "4 s"]),
    "send garbage": ("import os, sys\nos.write(int(sys.argv[1]), b'[1]\\n')", ["not an answer"]),
    "send an object": (
        'import os, sys\nos.write(int(sys.argv[1]), b\'{"value": {"pickle": [1]}}\\n\')',
        ["not an answer"],
    ),
    "a wrong shape": ("def loss(logps, *others, **settings):\n    return logps.sum()", ["loss", "shape ()"]),
    "a wrong advantage": ("def advantages(rewards, n):\n    return 1.0", ["advantages", "float"]),
    "a wrong reward": ("rewards = [lambda **columns: ['a']]", ["reward"]),
    "take memory": ("bytearray(2**33)", ["MemoryError"]),
}


# Each starts a sandbox of its own, and what the sandbox stops is tried in test_grading_sandbox.py in every run.
ALWAYS = "sample more"


@needs_isolation
@pytest.mark.parametrize(
    "attack", [name if name == ALWAYS else pytest.param(name, marks=pytest.mark.long) for name in ATTACKS]
)
def test_what_breaks_a_rule_is_rejected_with_the_reason(judge, submit, monkeypatch, attack):
    monkeypatch.setattr(challenge, "_PATIENCE", 4.0 if attack == "wait" else 60.0)
    code, words = ATTACKS[attack]
    entry = judge.judge("eve", submit(code))
    assert entry.estimate is None
    assert all(word in entry.rejected for word in words), entry.rejected


# what is not there cannot be touched: code that finds it fails
NOT_THERE = {
    "a model": "import gc\nassert not [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]",
    "the judge's memory": "assert len([one for one in os.listdir('/proc') if one.isdigit()]) == 1",
    "the judge's files": (
        "for path in (HERE + '/pyproject.toml', JUDGE + '/challenge.py'):\n    assert not os.path.exists(path)"
    ),
    "weights and problems, even without the judge's message": (
        "import subprocess\nfrom grpo_edu.problems.templates import data_dir\n"
        "found = subprocess.run(['ls', '-A', data_dir() / 'models', data_dir() / 'problems'], capture_output=True)\n"
        "assert found.returncode == 0 and b'tiny' not in found.stdout and b'heldout' not in found.stdout"
    ),
    "the network": "import socket\nassert socket.if_nameindex() == [(1, 'lo')]",
    "rights": "assert os.getuid() != 0\ntry:\n    os.setuid(0)\nexcept OSError:\n    pass\nassert os.getuid() != 0",
}


@needs_isolation
def test_what_a_submission_cannot_find(judge, submit):
    places = f"import os, torch\nHERE, JUDGE = {os.getcwd()!r}, {os.path.dirname(challenge.__file__)!r}\n"
    checks = "\n".join(NOT_THERE.values())
    inside = "\n".join(f"    {line}" for line in checks.splitlines())
    reward = f"def reward(completions, **columns):\n{inside}\n    return [float(len(one)) for one in completions]\n"
    entry = judge.judge("eve", submit(f"{places}{checks}\n{reward}rewards = [reward]"))
    assert not entry.rejected and len(entry.accuracies) == 1


@pytest.mark.long
@pytest.mark.parametrize("attack", ["load the model", "change the count"])
def test_a_try_at_home_without_isolation_gets_the_same_messages(judge, submit, monkeypatch, attack):
    monkeypatch.setattr(judge, "isolated", False)
    code, words = ATTACKS[attack]
    rejected = judge.judge("eve", submit(code)).rejected
    assert all(word in rejected for word in words), rejected


@needs_isolation
@pytest.mark.long
def test_training_ends_with_the_budget_and_phases_share_it(judge, submit):
    phases = "def settings(start):\n    one = {'prompts_per_step': 2, 'num_generations': 4}\n"
    entry = judge.judge("ana", submit(f"{phases}    return [one | {{'max_steps': 2}}, one | {{'temperature': 0.8}}]"))
    assert not entry.rejected and 0.6 * RULES.budget < entry.tokens[0] <= RULES.budget


def test_later_phases_have_seeds_of_their_own():
    found = phases_of([{"max_steps": 3}, {"temperature": 0.5}], 7, 100)
    assert [config.seed for config, _ in found] == [7, 8] and [is_open for _, is_open in found] == [False, True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 1}, "seed.*judge"),
        ({"num_epochs": 1}, "num_epochs.*unknown"),
        ({"num_iterations": 10**6}, "num_iterations.* 16"),
        ({"prompts_per_step": 10**5}, "prompts_per_step.*800,000"),
        ({"num_generations": 1}, "num_generations.*at least 2"),
        ({"prompts_per_step": 512, "num_generations": 64, "max_completion_length": 1}, "num_generations.*4,096"),
        ({"prompts_per_step": torch.tensor(512, dtype=torch.int16)}, "prompts_per_step.*Tensor.*plain number"),
        ({"max_completion_length": 97}, "max_completion_length.* 96"),
        ({"lr_scheduler_type": "linear"}, "max_steps.*linear"),
        ([{}, {}], "max_steps.*all phases but the last"),
        ([], "settings.*list of such dicts"),
    ],
)
def test_settings_that_break_a_rule_are_rejected_with_the_reason(settings, words):
    with pytest.raises(challenge.SubmissionRejectedError, match=words):
        phases_of(settings, 7, 100)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 9), "model.safetensors"),
        (lambda folder: (folder / "submission.py").write_text("#" * 20_001), "20,000"),
        (lambda folder: (folder / "note.md").write_text("It is good."), "20 words"),
        (lambda folder: (folder / "note.md").unlink(), "note.md is missing"),
        (lambda folder: [(folder / "note.md").unlink(), (folder / "note.md").symlink_to("/etc/passwd")], "note.md"),
    ],
)
def test_a_folder_with_more_or_less_is_refused(submit, change, word):
    folder = submit()
    assert read_submission(folder)[1] == NOTE
    change(folder)
    with pytest.raises(challenge.SubmissionRejectedError, match=word):
        read_submission(folder)


def test_a_link_to_another_submission_is_refused_and_no_two_entries_have_one_name(submit, tmp_path, monkeypatch):
    for name in ("ben", "ben\u200b", "(without training)", "a" * 60 + "1", "a" * 60 + "2"):
        submit(name=name)
    (tmp_path / "submissions" / "ana").symlink_to("ben")
    monkeypatch.setattr(challenge, "check_isolation", lambda isolated, tell: None)
    monkeypatch.setattr(Judge, "_one_run", lambda self, source, row: (1, 0.5))
    monkeypatch.setattr(Judge, "untrained", lambda self: Entry("(without training)", "tiny", [0.5, 0.5]))
    rules = Rules(seeds=2, num_train=3, num_heldout=3)
    found = challenge.judge_submissions(tmp_path / "submissions", tmp_path / "out", starts=["tiny"], rules=rules)
    assert len({one.name for one in found}) == len(found) == 7
    assert [one.name for one in found if "is a link" in one.rejected] == ["ana"]


def test_overlapping_intervals_are_ties():
    scores = {"a": [0.80, 0.82, 0.81], "b": [0.78, 0.82, 0.80], "c": [0.60, 0.61, 0.62], "d": [0.2, 0.3, 0.2]}
    entries = [Entry(name, "tiny", values) for name, values in scores.items()]
    entries.append(Entry("other start", "halfway", [0.95, 0.96, 0.97]))
    assert [rank(one, entries) for one in entries] == [1, 1, 3, 4, 1]


def test_the_interval_of_an_accuracy_ends_at_its_bounds():
    two_seeds = Entry("two seeds", "tiny", [0.6, 0.84]).estimate  # Student's factor is 12.7: 0.72 ± 1.52
    assert (two_seeds.low, two_seeds.high) == (0.0, 1.0) and two_seeds.value == pytest.approx(0.72)


def test_the_page_about_the_challenge_shows_the_stored_results():
    record = json.loads((REPOSITORY / "benchmarks" / "results" / "challenge.json").read_text())
    page = (REPOSITORY / "docs" / "challenge.md").read_text(encoding="utf-8")
    entries = [Entry(**{name: one[name] for name in one if name != "estimate"}) for one in record["entries"]]
    assert len(entries) == 8 and record["rules"] == asdict(Rules()) | {"budget": BUDGETS}
    for one in entries:
        assert f"| {one.start} | {rank(one, entries)} | {one.name} | {one.estimate} |" in page
    assert record["command"] in page and all(f"{budget:,} sampled tokens" in page for budget in BUDGETS.values())


def test_the_page_escapes_what_students_write():
    script = "<script>alert(1)</script>"
    entries = [Entry("ana $x_{", "tiny", [0.5, 0.6], [90, 80], note=script), Entry("eve", "tiny", rejected=script)]
    record = {"rules": {"budget": {"tiny": 100}, "seeds": 2, "num_heldout": 9}, "seed": 5, "isolation": "none"}
    page = leaderboard_page(entries, record | {"grpo_edu": "1", "command": script})
    assert script not in page and page.count("&lt;script&gt;") == 3
    assert "WITHOUT ISOLATION" in page and "55% [" in page and "90</td>" in page


@needs_isolation
def test_a_class_with_the_example_of_the_page_is_judged_from_the_command_line(submit, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(challenge, "Rules", partial(Rules, num_train=30, num_heldout=9))
    page = (REPOSITORY / "docs" / "challenge.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    smaller = "\nbigger = settings\ndef settings(start):\n    return bigger(start) | {'num_generations': 2}\n"
    submit(example + smaller, name="ana")
    submit(note="It is good.", name="bob")
    folder, output = tmp_path / "submissions", tmp_path / "out"
    command = ["challenge", "judge", str(folder), "--output", str(output), "--start", "halfway", "--seeds", "2"]
    assert main([*command, "--budget", "1500", "--seed", "4"]) == 0
    assert "2 submissions, 1 rejected" in capsys.readouterr().out
    record = json.loads((output / "leaderboard.json").read_text())
    names = [(one["name"], len(one["accuracies"]), bool(one["rejected"])) for one in record["entries"]]
    assert names == [("(without training)", 2, False), ("ana", 2, False), ("bob", 0, True)]
    assert record["seed"] == 4 and record["command"].startswith("grpo-edu challenge judge")
    page = (output / "leaderboard.html").read_text()
    assert "ana" in page and "20 words" in page and "<img alt=" in page
    assert main([*command, "--budget", "1500"]) == 2 and "not empty" in capsys.readouterr().err


@pytest.fixture
def submit_command(tmp_path, monkeypatch):
    """The options of `challenge submit` for a small try and a class in the folder of the test."""
    monkeypatch.setattr(challenge, "Rules", partial(Rules, num_train=30, num_heldout=9))
    return ["--start", "halfway", "--budget", "1500", "--to", str(tmp_path / "class")]


@needs_isolation
def test_a_submission_is_tried_and_copied_once(submit, submit_command, tmp_path, capsys):
    command = ["challenge", "submit", str(submit()), *submit_command, "--name", "team"]
    assert main(command) == 0
    assert sorted(path.name for path in (tmp_path / "class" / "team").iterdir()) == ["note.md", "submission.py"]
    assert main(command) == 2
    assert "--name" in capsys.readouterr().err


@needs_isolation
@pytest.mark.long
def test_what_is_rejected_is_not_submitted(submit, submit_command, tmp_path, capsys):
    assert main(["challenge", "submit", str(submit("raise ValueError('bad')")), *submit_command]) == 1
    assert "ValueError: bad" in capsys.readouterr().err and not (tmp_path / "class").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere"], ["nowhere", "does not exist"]),
        (["run", "."], ["submission.py", "missing"]),
        (["run", ".", "--seeds", "0"], ["seeds", "0"]),
        (["run", ".", "--start", "huge"], ["huge", "halfway"]),
        (["judge", "."], ["--output"]),
        (["judge", ".", "--output", "out", "--seeds", "1"], ["seeds", "2"]),
        (["run", ".", "--budget", "0"], ["budget", "0"]),
    ],
)
def test_what_cannot_be_done_is_said(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["challenge", *arguments]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_without_isolation_nothing_is_judged_unless_asked(submit, tmp_path, monkeypatch, capsys):
    submit()
    monkeypatch.setattr("classroom.sandbox.isolation_problem", lambda: "There is no bubblewrap.")
    command = ["challenge", "judge", str(tmp_path / "submissions"), "--output", str(tmp_path / "out")]
    assert main(command) == 2
    assert "There is no bubblewrap" in capsys.readouterr().err and not (tmp_path / "out").exists()
