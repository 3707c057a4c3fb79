"""The command line: what it prints, its exit codes, and what a kill, Ctrl-C and a full disk leave behind."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_policy import fill, names_in
from test_resume import interrupt, kill_softly, stopping_at

from classroom import cli
from grpo_edu import __version__
from grpo_edu.cli.classroom import classroom_module
from grpo_edu.cli.main import COMMANDS, build_parser, main
from grpo_edu.cli.options import FIRST, TOPICS
from grpo_edu.config import GRPOConfig, field_help
from grpo_edu.machine.hardware import Check
from grpo_edu.machine.startup import AFTERWARDS, PHASES
from grpo_edu.models import load_policy
from grpo_edu.rewards import REWARDS, length_reward
from grpo_edu.runs.log import read_log
from grpo_edu.runs.options import RunConfig

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
SMALL = shlex.split(
    "--rewards length --num-generations 4 --prompts-per-step 2 --max-completion-length 48 --n 6 --no-greedy"
)
COUNTS = {"k", "n", "low", "high", "accuracy"}

pytestmark = pytest.mark.usefixtures("no_pictures")


def start(*arguments, **options) -> subprocess.Popen:
    """`python -m grpo_edu` with these arguments in a process of its own, its output in pipes."""
    command = [sys.executable, "-m", "grpo_edu", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=ENVIRONMENT, **(pipes | options))


def complaint(capsys) -> str:
    """The one line on stderr; nothing may be on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_train_then_evaluate(policy_dir, tmp_path, capsys, monkeypatch):
    process = start("train", "--model", policy_dir, *SMALL, "--steps", 2, "--seed", 7, "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=500)
    lines = [line for line in err.splitlines() if not re.search(r" of \d+ \[", line)]  # on a slow computer, of progress
    assert process.returncode == 0 and lines == [], err  # a pipe gets no bars and no chatter
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["steps"] == 2 and result["seed"] == 7 and result["interrupted"] is False
    assert COUNTS <= result["accuracy_before"].keys() and result["accuracy_after"]["n"] == 6
    assert 0 <= result["p_value"] <= 1 and 0 < result["seconds"] < 500

    output = tmp_path / "runs" / "random-levels-seed7"
    assert result["output"] == str(output) and len(read_log(output / "metrics.jsonl")) == 2
    typed = shlex.join(["grpo-edu", "train", "--model", str(policy_dir), *SMALL])
    assert f"{typed} --steps 2 --seed 7 --json" in (output / "summary.md").read_text()

    monkeypatch.chdir(tmp_path)
    options = ["--n", "6", "--seed", "7", "--max-completion-length", "48"]
    assert main(["evaluate", "--model", "runs/random-levels-seed7", *options, "--json"]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert {name: evaluation[name] for name in COUNTS} == {name: result["accuracy_after"][name] for name in COUNTS}
    assert list(evaluation["per_level"]) == ["basic", "intermediate", "advanced"]
    assert COUNTS <= evaluation["per_level"]["basic"].keys()

    assert main(["evaluate", "--model", "runs/random-levels-seed7", *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[:4]] == ["basic", "intermediate", "advanced", "all"]
    assert f"{evaluation['k']} of 6" in shown[3]


def test_without_a_terminal_there_are_lines_of_progress(policy_dir, tmp_path, capsys, monkeypatch):
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "2", "--output", str(tmp_path / "run")]
    assert main(arguments) == 0 and capsys.readouterr().err == ""  # it takes less than half a minute
    monkeypatch.setattr("grpo_edu.progress.LINE_SECONDS", 0.0)
    assert main([*arguments, "--overwrite"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"Evaluating before training: 6 of 6 \[00:\d\d<[\d:?]+\]", lines[0])
    assert re.fullmatch(r"Training: 1 of 2 \[00:\d\d<[\d:?]+, reward=0\.\d\d\]", lines[1])
    assert [line.split(":")[0] for line in lines[2:]] == ["Training", "Evaluating after training"]


def test_what_a_person_reads_after_training(policy_dir, tmp_path, capsys):
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "1", "--output", str(tmp_path / "run")]
    assert main([*arguments, "--greedy"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  sampled +before \d+\.\d% \[.*\] +after \d+\.\d% \[.*\]$", shown, re.MULTILINE)
    assert "greedy" in shown and "exact McNemar" in shown and "1 steps in" not in shown
    assert f"Saved in {tmp_path / 'run'}" in shown
    assert main(arguments) == 2
    assert "already holds a run" in complaint(capsys)
    assert main([*arguments, "--overwrite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("how", [interrupt, kill_softly])
def test_ctrl_c_or_sigterm_in_a_terminal_saves_what_was_done(
    policy_dir, tmp_path, capsys, monkeypatch, ctrl_c_works, how
):
    import termios

    output = tmp_path / "run"
    monkeypatch.setitem(REWARDS, "length", stopping_at(4, how))
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "9", "--output", str(output)]
        assert main([*arguments, "--json"]) == 130
    shown = b"".join(iter(partial(_read, ours), b""))
    os.close(ours)
    (line,) = capsys.readouterr().out.splitlines()
    result, log = json.loads(line), read_log(output / "metrics.jsonl")
    assert result["interrupted"] is True and result["accuracy_after"] is None and result["p_value"] is None
    assert result["steps"] == len(log) == log[-1]["step"] == 3
    assert load_policy(output / "model") and "Interrupted after" in (output / "summary.md").read_text()
    # a terminal gets a bar with the time left, and a word on what was saved
    assert re.search(rb"Training: .*\[\d\d:\d\d<[\d:]+", shown) and b"Traceback" not in shown
    said = f"grpo-edu: interrupted after 3 of 9 steps; model, metrics and summary are saved in {output}"
    assert said.encode() in shown and b"--resume" in shown


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_that_is_closed_costs_nothing(policy_dir, tmp_path, monkeypatch, ctrl_c_works):
    output, (ours, theirs) = tmp_path / "run", os.openpty()

    def close(completions):
        os.close(ours)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setitem(REWARDS, "length", stopping_at(4, close))
    with suppress(OSError), open(theirs, "w") as terminal:  # its last words have no reader
        monkeypatch.setattr(sys, "stderr", terminal)
        assert main(["train", "--model", str(policy_dir), *SMALL, "--steps", "9", "--output", str(output)]) == 130
    assert load_policy(output / "model") and (output / "state.pt").is_file()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other side is closed
        return b""


def test_a_kill_leaves_readable_metrics(policy_dir, tmp_path, capsys, monkeypatch):
    """What is on the disk in the middle of a step is what a kill then would leave."""
    left = tmp_path / "left"

    def copy(completions):
        shutil.copytree(tmp_path / "run", left)
        return length_reward(completions)

    monkeypatch.setitem(REWARDS, "length", stopping_at(3, copy))
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "3", "--output"]
    assert main([*arguments, str(tmp_path / "run")]) == 0
    assert [record["step"] for record in read_log(left / "metrics.jsonl")] == [1, 2]
    assert json.loads((left / "config.json").read_text())["config"]["max_steps"] == 3
    capsys.readouterr()
    assert main(["evaluate", "--model", str(left)]) == 2
    assert "has no model" in complaint(capsys)
    assert main([*arguments, str(left)]) == 2
    assert "already holds a run" in complaint(capsys)


def test_a_disk_that_fills_up(policy_dir, small_disk, capsys, monkeypatch):
    output = small_disk / "run"

    def fill_disk(completions):
        fill(small_disk)
        return length_reward(completions)

    monkeypatch.setitem(REWARDS, "length", stopping_at(2, fill_disk))
    assert main(["train", "--model", str(policy_dir), *SMALL, "--steps", "100000", "--output", str(output)]) == 1
    line = complaint(capsys)
    assert line.startswith("grpo-edu: error: ") and "No space left on device" in line
    steps = len(read_log(output / "metrics.jsonl"))
    assert re.search(rf"{re.escape(str(output))} keeps {steps} steps?: metrics\.jsonl, model, summary\.md$", line)
    kept = {  # no completions, because of 100,000 steps the first ones keep none
        "config.json",
        "first_look.txt",
        "metrics.jsonl",
        "model",
        "summary.md",
        "curves.png",
        "result.json",
    }
    assert load_policy(output / "model") and names_in(output) == kept
    assert json.loads((output / "result.json").read_text())["steps"] == steps


def test_a_training_that_diverges_keeps_what_was_done(policy_dir, tmp_path, capsys):
    output = tmp_path / "run"
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "9", "--output", str(output)]
    assert main([*arguments, "--learning-rate", "1e30", "--beta", "1"]) == 1
    line = complaint(capsys)
    assert "finite" in line and re.search(r"keeps \d steps?: metrics\.jsonl, model, summary\.md", line)
    assert "Stopped by an error" in (output / "summary.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --data advancd", "--data.*'advancd'.*basic, intermediate, advanced"),
        ("train --rewards accuracy,speed", "--rewards.*'speed'.*accuracy, format"),
        ("train --num-generations 1", "--num-generations.*2.*1"),
        ("train --gradient-accumulation-steps 3", "--gradient-accumulation-steps.*--prompts-per-step.*3"),
        ("train --resume no-such-run", "--resume.*no-such-run.*not exist"),
        ("sweep --resume no-such-run", "--resume.*no-such-run"),
        ("train --model no-template", "chat template.*line 1.*correct"),
        ("evaluate --model {policy} --n 3 --max-completion-length 0", "--max-completion-length.*0"),
        ("train --steps 0", "--steps.*at least 1.*0"),
        ("train --learning-rate nan", "--learning-rate.*positive.*nan"),
        ("train --model no-such-model", "--model.*no-such-model"),
        ("train --model ./no-such-folder", "--model.*./no-such-folder"),
        ("train --model {policy} --lora-rank 2 --lora-targets nope", "--lora-targets.*'nope'.*down_proj, .*v_proj"),
        ("train --seed 99999999999999999999", "--seed.*64 bits.*99999999999999999999"),
        ("train --output .", "--output.*not a run.*empty folder"),
        ("evaluate --n 0", "--n.* 0.*basic"),
        ("evaluate --n 3 --rewards gone.py:mine", "gone.py does not exist"),
        ("evaluate --model ./broken.jsonl", "--model: ./broken.jsonl is a file"),
        ("evaluate --data gsm8k --data-path no-such-folder", "--data-path.*no-such-folder"),
        ("evaluate --n 3 --seed -99999999999999999999", "--seed.*64 bits.*-99999999999999999999"),
        ("evaluate --data gsm8k --data-path broken.jsonl --n 1", "broken.jsonl:2: .*JSON"),
        ("evaluate --model {policy} --n 3 --max-completion-length 1000", "context of 1024"),
        ("evaluate --model {policy} --n 3 --temperature -1", "--temperature.*0.*positive"),
        ("evaluate --model damaged --n 3", "damaged"),
        ("evaluate --model incomplete --n 3", "has no tokenizer"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(policy_dir, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question"\n')
    for name, left_out in (("damaged", ""), ("incomplete", "tokenizer.json"), ("no-template", "")):
        Path(name).mkdir()
        for file in policy_dir.iterdir():
            if file.name != left_out:
                (Path(name) / file.name).write_bytes(file.read_bytes())
    Path("damaged/model.safetensors").write_bytes(b"not weights")
    Path("no-template/chat_template.jinja").write_text("{% for message in %}")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments.format(policy=policy_dir).split()) == 2
    line = complaint(capsys)
    assert line.startswith("grpo-edu: error: ") and re.search(message, line)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "invalid choice: 'trian'"),
        ("train --loss-type ppo", "argument --loss-type: invalid choice: 'ppo'"),
        ("train --reward-weights 1,x", "argument --reward-weights: invalid comma-separated number value: '1,x'"),
        ("evaluate --n many", "argument --n: invalid int value: 'many'; see grpo-edu evaluate --help"),
        ("evaluate --steps 3", "unrecognized arguments: --steps 3; see grpo-edu evaluate --help"),
        ("train --verbose", "unrecognized arguments: --verbose; see grpo-edu train --help"),
        ("train --learning-rat 1", "--learning-rat 1 (do you mean --learning-rate?); see grpo-edu train --help"),
        ("train --lr 1e-5", "--lr 1e-5 (do you mean --learning-rate?); see"),
        ("train --learning_rate=1e-5", "--learning_rate=1e-5 (do you mean --learning-rate?); see"),
        ("train --batch-size 4", "(do you mean --prompts-per-step?); see"),
        ("train --epochs 4", "(do you mean --steps?); see"),
        ("train --step 4", "(do you mean --steps?); see"),
        ("train --output-dir here", "(do you mean --output?); see"),
        ("train --reward-funcs length", "(do you mean --rewards?); see"),
        ("show run --steps 4", "(do you mean --step?); see grpo-edu show --help"),
        ("evaluate --output-dir here", "unrecognized arguments: --output-dir here; see"),
    ],
)
def test_a_mistyped_command_is_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    line = complaint(capsys)
    assert line.startswith("grpo-edu: error: ") and message in line


def test_debug_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="advancd"):
        main(["train", "--data", "advancd", "--debug"])


def test_a_reader_that_leaves_early_is_no_error(policy_dir, capfd, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["evaluate", "--model", str(policy_dir), "--n", "3", "--max-completion-length", "4"]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(os.name != "posix", reason="closes a file descriptor before the program starts")
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(closed):
    number = {"stdout": 1, "stderr": 2}[closed]
    process = start("profiles", preexec_fn=partial(os.close, number), **{closed: None})
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0 and not err
    assert out is None or "quick" in out
    process = start("evaluate", "--model", "./nope", preexec_fn=partial(os.close, number), **{closed: None})
    out, err = process.communicate(timeout=500)
    assert process.returncode == 2 and not out  # a complaint is never part of the output
    assert err is None or "--model" in err


def test_every_setting_is_an_option_with_a_word_on_it():
    arguments = build_parser().parse_args(["train"])
    assert not [field.name for field in fields(GRPOConfig) if hasattr(arguments, field.name)]
    assert all(len(text) > 5 for name, text in field_help(RunConfig).items())
    typed = []
    for field in fields(GRPOConfig):
        flag = "--steps" if field.name == "max_steps" else "--" + field.name.replace("_", "-")
        value = {
            "reward_weights": "1,0.5",
            "epsilon_high": "0.3",
            "memory_budget_gib": "4.5",
            "rollout_quantization": "bf16",
        }.get(field.name, str(field.default))
        typed += [flag] if isinstance(field.default, bool) else [flag, value]
        assert len(field_help(GRPOConfig)[field.name]) > 5, field.name
    arguments = vars(build_parser().parse_args(["train", *typed]))
    given = GRPOConfig(**{field.name: arguments[field.name] for field in fields(GRPOConfig)})
    expected = {"reward_weights": (1.0, 0.5), "epsilon_high": 0.3, "memory_budget_gib": 4.5}
    expected |= {"rollout_quantization": "bf16"}
    expected |= {field.name: True for field in fields(GRPOConfig) if field.default is False}
    assert given == GRPOConfig(**expected)


WELL = Check("Python", True, "3.12.1, supported: >=3.11")
FAULT = Check("memory", False, "1.0 of 4.0 GiB available", "Close other programs.")


def test_doctor_says_whether_students_code_can_be_isolated(monkeypatch):
    monkeypatch.setattr("classroom.sandbox.isolation_problem", lambda: "")
    (check,) = cli.grading_checks()
    assert check.ok and "bubblewrap" in check.detail and not check.remedy
    monkeypatch.setattr("classroom.sandbox.isolation_problem", lambda: "bubblewrap is not installed.")
    (check,) = cli.grading_checks()
    assert (
        check.ok and "not installed" in check.detail and "`bubblewrap`" in check.remedy and "container" in check.remedy
    )


@pytest.mark.parametrize("arguments", [["grade", "folder", "--output", "new"], ["challenge", "--help"]])
def test_without_the_instructors_package_its_commands_say_how_to_get_it(arguments, capsys, monkeypatch):
    monkeypatch.setattr("grpo_edu.cli.classroom.entry_points", lambda group: {})
    classroom_module.cache_clear()
    try:
        assert main(arguments) == 2 and main([]) == 0
    finally:
        classroom_module.cache_clear()
    printed = capsys.readouterr()
    assert arguments[0] in printed.err and "grpo-edu[classroom]" in printed.err and "course.py setup" in printed.err
    assert arguments[0] in printed.out  # the help lists it all the same


def test_doctor(capsys, monkeypatch):
    monkeypatch.setattr("classroom.cli.grading_checks", lambda: [])
    monkeypatch.setattr("grpo_edu.machine.hardware.doctor_checks", lambda: [WELL])
    assert main(["doctor", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["ok"] is True and found["checks"] == [asdict(WELL)]
    assert found["cpu"]["torch_threads"] >= 1  # the report is this machine's own

    monkeypatch.setattr("grpo_edu.machine.hardware.doctor_checks", lambda: [WELL, FAULT])
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checks"][1]["remedy"] == "Close other programs."
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split()[:2] == ["ok", "Python"] and shown[1].split()[:2] == ["PROBLEM", "memory"]
    assert shown[2].strip() == "Close other programs." and "1 of 2" in shown[-1]
    assert any(line.startswith("  instruction sets") for line in shown)


def test_doctor_measures_the_start_where_it_is_asked_to(capsys, monkeypatch):
    asked = []
    seconds = dict.fromkeys(PHASES + AFTERWARDS, 0.5)
    monkeypatch.setattr("grpo_edu.machine.startup.startup_anatomy", lambda: asked.append(True) or seconds)
    monkeypatch.setattr("grpo_edu.machine.hardware.doctor_checks", lambda: [WELL])
    assert main(["doctor"]) == 0 and not asked
    capsys.readouterr()
    assert main(["doctor", "--startup", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["startup"] == seconds
    assert main(["doctor", "--startup"]) == 0
    assert re.search(r"^  total +3\.00 s$", capsys.readouterr().out, re.MULTILINE)


def test_train_through_trl_in_bfloat16(policy_dir, tmp_path, capsys):
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "2", "--output", str(tmp_path / "run")]
    assert main([*arguments, "--backend", "trl", "--dtype", "bfloat16", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 2 and len(read_log(tmp_path / "run" / "metrics.jsonl")) == 2
    assert re.search(r"^grpo-edu: bfloat16 is .* times as fast", captured.err)
    asked = json.loads((tmp_path / "run" / "config.json").read_text())
    assert asked["backend"] == "trl" and asked["dtype"] == "bfloat16"
    assert main([*arguments, "--backend", "trl", "--overwrite", "--advantage-estimator", "rloo"]) == 2
    refusal = complaint(capsys)
    assert "--advantage-estimator" in refusal and "'rloo'" in refusal and "choose 'group'" in refusal


@pytest.mark.filterwarnings("always::RuntimeWarning")
def test_training_weights_in_bfloat16_warns_in_one_line(policy_dir, tmp_path, capsys):
    arguments = ["train", "--model", str(policy_dir), *SMALL, "--steps", "1", "--output", str(tmp_path / "run")]
    assert main([*arguments, "--dtype", "bfloat16", "--learning-rate", "1e-6"]) == 0
    lines = capsys.readouterr().err.splitlines()
    (warning,) = [line for line in lines if "warning" in line]
    assert re.match(r"grpo-edu: warning: .*bfloat16.*--learning-rate = 1e-06.*%.*LoRA", warning)


def test_doctor_looks_at_this_machine(capsys):
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if all(check["ok"] for check in found["checks"]) else 1)
    assert {"Python", "packages", "tiny model", "memory"} <= {check["name"] for check in found["checks"]}


@pytest.mark.parametrize("command", [[], ["doctor"], ["train"], ["evaluate"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0 and "usage: grpo-edu" in capsys.readouterr().out


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name}" in shown for name in COMMANDS)


def topics_of_help(capsys, flag: str) -> dict[str, str]:
    """The groups of options that `grpo-edu train` shows."""
    with pytest.raises(SystemExit):
        main(["train", flag])
    return dict(re.findall(r"^([^\n]+):\n((?:  .*\n)+)", capsys.readouterr().out, re.MULTILINE))


def test_the_help_of_train_shows_twelve_options_and_help_all_the_rest_by_topic(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    first = topics_of_help(capsys, "--help")
    assert list(first) == ["options"]
    flags = set(re.findall(r"^  (--[\w-]+)", first["options"], re.MULTILINE)) - {"--help-all"}
    assert len(flags) == 12 and {"--profile", "--model", "--steps", "--output", "--resume"} <= flags
    topics = topics_of_help(capsys, "--help-all")
    assert list(topics) == ["options", *TOPICS, "every command"]
    for name, lines in topics.items():
        assert name == "options" or lines.count("\n") <= 10, name
    settings = {field.name for kind in (RunConfig, GRPOConfig) for field in fields(kind)} - {"config"}
    assert sorted(settings) == sorted([*FIRST, *(name for names in TOPICS.values() for name in names)])


def test_a_missing_folder_is_refused_before_anything_is_loaded(tmp_path):
    names = ["runs/typo", "models/typo", "./typo", "/no/such/model"]
    code = (
        "import sys; from grpo_edu.cli.main import main; "
        "codes = {main(['evaluate', '--model', name]) for name in sys.argv[1:]}; "
        "assert codes == {2} and 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, *names]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT)
    assert found.returncode == 0, found.stderr
    for name, line in zip(names, found.stderr.splitlines(), strict=True):
        assert f"--model: folder {name} does not exist" in line


def test_an_interrupted_run_is_reported_once(capsys, monkeypatch, tmp_path):
    config = GRPOConfig(max_steps=9)
    stopped = SimpleNamespace(interrupted=True, history=[{}], config=config, output=tmp_path)
    monkeypatch.setattr("grpo_edu.runs.run.start_run", lambda *arguments, **options: stopped)
    assert main(["train", "--steps", "9"]) == 130
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("1 of 9 steps") == 1


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo-edu {__version__}\n"
