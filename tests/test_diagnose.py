"""`grpo-edu diagnose`: the formats that it reads, what it sees in them, and of a file that is not a log."""

import io
import json
from math import exp, nan, sin
from pathlib import Path
from random import Random

import pytest

from benchmarks.diagnose import BY_HAND, FAULTS, ISSUES, LOGS, TABLE, of_issues, table
from grpo_edu.cli.main import main
from grpo_edu.cli.results import _find_turn_end
from grpo_edu.dashboards import LogDiagnosis
from grpo_edu.dashboards.base import marked_text
from grpo_edu.runs.log import read_log
from grpo_edu.runs.log_diagnosis import CAUSES, diagnose, diagnosis_text
from grpo_edu.runs.metric_logs import parse_metrics, read_metrics

STEP = {
    "loss": 0.0,
    "grad_norm": 0.5,
    "reward": 0.5,
    "reward_std": 0.5,
    "frac_reward_zero_std": 0.1,
    "completions/mean_length": 30.0,
    "completions/clipped_ratio": 0.0,
    "entropy": 0.3,
}


def rising(count=20, **changes):
    """A healthy run whose reward rises from 0.3; `changes` are values, or functions of the number of the step."""
    rows = []
    for step in range(1, count + 1):
        row = {**STEP, "step": step, "reward": 0.3 + 0.5 * step / count + 0.02 * (-1) ** step}
        rows.append(row | {name: value(step) if callable(value) else value for name, value in changes.items()})
    return rows


def faults(rows):
    return [finding.causes[0].fault for finding in diagnose(rows).findings]


@pytest.mark.parametrize("name", ISSUES)
def test_logs_as_issues_describe_them(name):
    fault, _ = ISSUES[name]
    assert faults(read_metrics(BY_HAND / name)) == [fault] * bool(fault)
    assert set(ISSUES) == {file.name for file in BY_HAND.iterdir() if file.suffix != ".md"}


def test_the_stored_table_is_what_the_rules_say_today():
    records, stored = read_log(LOGS), json.loads(TABLE.read_text(encoding="utf-8"))
    assert stored["report"] == table((record["arm"], record["metrics"]) for record in records)
    assert stored["issues"] == of_issues()
    assert not {record["seed"] for record in records} & set(range(5)), "those are the seeds of the selection"


def test_every_fault_of_the_lab_is_a_known_cause():
    assert list(CAUSES)[: len(FAULTS)] == FAULTS


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (rising(), []),
        (rising(reward=0.0, frac_reward_zero_std=1.0, grad_norm=0.0), ["reward always 0"]),
        (rising(reward=lambda step: 0.01 * (-1) ** step, frac_reward_zero_std=0.0), ["mask off by one"]),
        (rising(reward=0.9, frac_reward_zero_std=1.0, grad_norm=0.0), ["tied rewards"]),
        (rising(reward=lambda step: 0.5 * (step < 5)), ["lr too high"]),
        (rising(entropy=lambda step: 0.3 * step), ["lr too high"]),
        (rising(kl=lambda step: 0.01 * 1.5**step, loss=lambda step: -0.02 * 1.5**step), ["KL wrong sign"]),
        (rising(kl=lambda step: 0.01 * 1.5**step, loss=lambda step: 0.02 * 1.5**step), ["lr too high"]),
        (rising(**{"clip_ratio/region_mean": lambda step: 0.002 * (step - 1)}), ["stale old log-probabilities"]),
        (rising(**{"clip_ratio/region_mean": lambda step: 0.05 * (step % 2 == 0)}), []),  # two updates per batch
        (rising(**{"clip_ratio/region_mean": 0.05}), []),  # several updates in every logged step
        (rising(**{"completions/clipped_ratio": 0.2}), ["length truncation"]),
        (rising(reward=lambda step: 0.5 + 0.05 * (-1) ** step), ["mask off by one"]),
        (rising(reward=lambda step: 0.5 + 0.05 * (-1) ** step, kl=0.1, loss=0.2), ["KL weight too large"]),
        (rising(reward=lambda step: 0.5 + 0.05 * (-1) ** step, kl=0.003, loss=0.0), ["KL weight too large"]),
        (rising(reward=lambda step: 0.5 + 0.05 * (-1) ** step, kl=lambda step: 0.001 * step), ["mask off by one"]),
        ([*rising(reward=lambda step: 0.5 + 0.05 * (-1) ** step), {**STEP, "kl": 0.1}], ["mask off by one"]),
        (rising(learning_rate=0.0), ["lr is 0"]),
        (rising(grad_norm=0.0), ["nothing trained"]),
        (rising(grad_norm=lambda step: None if step == 5 else 0.5), []),  # one step that a scaler skipped
        (rising(grad_norm=lambda step: None if step > 15 else 0.5), ["not finite"]),
        (rising(**{"rewards/a/std": 0.4, "rewards/b/std": 0.0, "rewards/b/mean": 1.0}), ["tied rewards"]),
        (rising(**{"rewards/a/std": 0.4, "rewards/b/std": 0.0, "rewards/b/mean": 0.0}), ["reward always 0"]),
    ],
)  # fmt: skip
def test_a_symptom_leads_to_its_cause(rows, expected):
    assert faults(rows) == expected


def test_sizes_that_the_values_give_away_and_what_the_log_lacks():
    rewards = [0.5, 0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.5, 1.0, 1.0]
    rows = [
        {"step": 1 + at, "reward": one, "frac_reward_zero_std": float(one != 0.5)} for at, one in enumerate(rewards)
    ]
    diagnosis = diagnose(rows)
    assert [finding.causes[0].fault for finding in diagnosis.findings] == ["G too small"]
    assert "1 group of 2" in diagnosis_text(diagnosis) and "`entropy`" in diagnosis.unknown[0]


def drawn(curve, count=60, noise=0.04, **columns):
    """A run whose reward follows a curve from 0 to 1, with noise; columns: values, or functions of the same place."""
    random, rows = Random(0), []
    for number in range(count):
        place = number / (count - 1)
        row = {"step": number + 1, "reward": curve(place) + random.gauss(0, noise)}
        rows.append(row | {name: value(place) if callable(value) else value for name, value in columns.items()})
    return rows


HEALTHY = {
    "rises": drawn(lambda x: 0.3 + 0.5 * x),
    "rises in much noise": drawn(lambda x: 0.3 + 0.4 * x, noise=0.12),
    "levels off": drawn(lambda x: 0.2 + 0.75 * (1 - exp(-5 * x)), 300),
    "levels off early": drawn(lambda x: 0.2 + 0.6 * (1 - exp(-8 * x)), 1000, 0.12),
    "rises in steps": drawn(lambda x: 0.2 + 0.2 * int(4 * x)),
    "begins high": drawn(lambda x: 0.9 + 0.05 * x, noise=0.02),
    "0 to 10": drawn(lambda x: 3 + 5 * x, noise=0.4),
    "negative": drawn(lambda x: -2 + 1.5 * x, noise=0.1),
    "of both signs": drawn(lambda x: -1 + 2 * x, noise=0.1),
    "a small dip at first": drawn(lambda x: 0.3 + 0.6 * x - 0.15 * (0.05 < x < 0.15)),
    "falls a little in the end": drawn(lambda x: 0.3 + 0.6 * sin(1.9 * x)),
    "six steps": drawn(lambda x: 0.3 + 0.2 * x, 6),
    "four completions a step": [
        {"step": 1 + step, "reward": sum(Random(4 * step + row).random() < 0.5 + step / 200 for row in range(4)) / 4}
        for step in range(60)
    ],
    "cut off at first": drawn(lambda x: 0.3 + 0.5 * x, **{"completions/clipped_ratio": lambda x: 0.4 * (1 - x) ** 3}),
    "ties at the end": drawn(lambda x: 0.5 + 0.45 * x, noise=0.02, frac_reward_zero_std=lambda x: 0.3 + 0.6 * x),
    "solved": drawn(lambda x: 0.95, noise=0.01),
    "a reward that is lost for two steps": [
        row | ({"reward": None} if row["step"] in (31, 32) else {}) for row in drawn(lambda x: 0.3 + 0.5 * x)
    ],
    "accuracy and reward rise": drawn(lambda x: 0.3 + 0.5 * x, accuracy=lambda x: 0.2 + 0.6 * x),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_is_silent(name):
    assert diagnose(HEALTHY[name]).findings == ()


@pytest.mark.parametrize(
    ("rows", "sees"),
    [
        (drawn(lambda x: 0.8 if x < 0.5 else 0.25), "The reward breaks down."),  # to a low plateau
        (drawn(lambda x: 0.8 if x < 0.9 else 0.0, noise=0.02), "The reward breaks down."),  # at the end
        (drawn(lambda x: 0.8 if x < 0.1 else 0.0, noise=0.02), "The reward breaks down within the first quarter"),
        (drawn(lambda x: 0.85 - 0.6 * x), "The reward breaks down."),  # slowly
        (drawn(lambda x: 0.3 + x if x < 0.6 else 0.1), "The reward breaks down."),  # after a rise
        (drawn(lambda x: 8 if x < 0.6 else 2, noise=0.5), "The reward breaks down."),
        (drawn(lambda x: -0.5 if x < 0.6 else -2, noise=0.1), "The reward breaks down."),
        (drawn(lambda x: 0.6 if x < 0.6 else -0.8, noise=0.1), "The reward breaks down."),
        (drawn(lambda x: 0.8 if x < 0.5 else 0.0, 10, 0.02), "The reward breaks down."),  # ten steps
        (drawn(lambda x: 0.9 if x < 0.7 else 0.02, 1500, 0.1), "The reward breaks down."),
        (drawn(lambda x: 0.8 - 0.22 * x), "The reward falls."),
        (drawn(lambda x: 0.7 - 0.3 * x, noise=0.1), "The reward falls."),
        (drawn(lambda x: 0.1 if 0.4 < x < 0.55 else 0.8), "The reward breaks down and recovers."),
        (drawn(lambda x: 0.9 if x < 0.4 else 0.13 if x < 0.5 else 0.5, entropy=lambda x: 0.14 if x < 0.4 else 7),
         "The reward breaks down and recovers in part."),
        (drawn(lambda x: 0.5 + 0.35 * sin(30 * x), 120, 0.03), "The reward breaks down and recovers several times."),
        (drawn(lambda x: 0.5), "The reward does not rise."),
        (drawn(lambda x: 5.0, noise=0.5), "The reward does not rise."),
        (drawn(lambda x: -1.5, noise=0.2), "The reward does not rise."),
        (drawn(lambda x: -1.0, noise=0, frac_reward_zero_std=1.0), "The reward is -1 in every step"),
        (drawn(lambda x: 0.5, noise=0), "The reward is 0.5 in every step"),
        (drawn(lambda x: 0.3 + 0.5 * x, accuracy=lambda x: 0.7 - 0.5 * x), "The reward rises while the accuracy"),
        (drawn(lambda x: 0.2 + 0.3 * x, **{"completions/mean_length": 512.0}), "Many completions are cut off."),
        (drawn(lambda x: nan), "Some numbers are not finite."),
    ],
)  # fmt: skip
def test_the_course_of_the_reward_comes_first(rows, sees):
    (finding,) = diagnose(rows).findings
    assert finding.sees.startswith(sees)
    if "breaks down" in sees or "falls." in sees:
        assert not {cause.fault for cause in finding.causes} & {"lr too low", "problems too easy", "problems too hard"}


def test_no_cause_is_named_that_the_reward_contradicts():
    solved = drawn(lambda x: 0.9 if x < 0.3 else 0.0, noise=0.02, frac_reward_zero_std=0.9, reward_std=0.16)
    (finding,) = diagnose(solved).findings
    assert finding.sees == "The reward breaks down." and "90% of the groups tie" in " ".join(finding.evidence)
    assert [cause.fault for cause in finding.causes] == ["lr too high", "KL weight too small"]
    (finding,) = diagnose(drawn(lambda x: 1.16, accuracy=0.75, reward_std=0.7, grad_norm=0.04)).findings
    assert "problems too hard" not in [cause.fault for cause in finding.causes]
    flat = drawn(lambda x: 0.5, kl=1.1, grad_norm=0.5)  # of another model, which is the reference
    (finding,) = diagnose(flat).findings
    assert "KL weight too large" not in [cause.fault for cause in finding.causes]
    assert any("reference is not the model" in text for text in finding.evidence)


def test_reasons_are_given_only_if_the_log_shows_them():
    ties = {"frac_reward_zero_std": 0.6}
    (note,) = diagnose(drawn(lambda x: 0.15 + 0.3 * x, **ties)).normal
    assert "does not tell how many of them are solved" in note
    (note,) = diagnose(drawn(lambda x: 0.5 + 0.45 * x, noise=0.01, **ties)).normal
    assert "most are solved" in note
    paid = drawn(lambda x: 0.4 + 0.52 * x, **{"completions/clipped_ratio": 1.0, "completions/mean_length": 512.0})
    text = diagnosis_text(diagnose(paid))
    assert "yet most of the reward is earned" in text and "before they reach an answer" not in text
    lengths = [256.0] * 7 + [250.1] + [256.0] * 42
    rows = [
        row | {"completions/mean_length": length} for row, length in zip(drawn(lambda x: 0.2, 50), lengths, strict=True)
    ]
    (finding,) = diagnose(rows).findings
    assert finding.causes[0].fault == "length truncation" and "256 in 98% of the steps" in " ".join(finding.evidence)


def test_a_log_without_a_known_reward_is_read_and_its_names_are_listed():
    rows = parse_metrics(b'{"loss": 1.0, "step": 1, "sparkle": 2}\n{"loss": 0.5, "step": 2, "sparkle": 3}\n', "a.jsonl")
    unknown = diagnose(rows).unknown
    assert "no name in this log is known to be the reward" in unknown[0] and "sparkle" in unknown[1]


EXPECTED = [{"step": 1, "loss": 0.5, "reward": 0.25}, {"step": 2, "loss": 0.0, "reward": 0.5}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 0.5, "reward": 0.25}\n{"step": 2, "loss": 0.0, "reward": 0.5}\n{"st'),
        ("trainer_state.json", '{"log_history": [{"step": 1, "loss": 0.5, "reward": 0.25}, '
         '{"eval_loss": 1, "step": 1}, {"step": 2, "loss": 0.0, "reward": 0.5}, {"step": 2, "train_runtime": 3.0}]}'),
        ("terminal.txt", "loading\n{'loss': '0.5', 'reward': '0.25'}\r 50%|{'loss': np.float64(0.0), 'reward': 0.5}"),
        ("wandb.csv", '"Step","a b - train/loss","a b - train/loss__MIN","a b - train/reward"\n'
         '1,0.5,0.4,0.25\n2,0.0,,0.5\n'),
        ("wandb.jsonl", '{"train/global_step": 1, "train/loss": 0.5, "_runtime": 7}\n{"train/global_step": 1, '
         '"train/reward": 0.25}\n{"train/global_step": 2, "train/loss": 0.0, "train/reward": 0.5}\n'
         '{"train/global_step": 3, "train/reward": null, "eval/reward": 0.3}\n'),
        ("powershell.txt", "{'loss': 0.5, 'reward': 0.25}\n{'loss': 0.0, 'reward': 0.5}\n"),
        ("notebook.txt", "Step | Training Loss | reward\n1 | 0.5 | 0.25\n2 | 0.0 | 0.5\n"),
        ("verl.txt", "(TaskRunner pid=1) step:1 - actor/loss:0.5 - critic/score/mean:np.float64(0.25)\n"
         "step:2 - actor/loss:0.0 - critic/score/mean:0.5\n"),
        ("verl_file.jsonl", '{"step": 1, "data": {"actor/loss": 0.5, "critic/score/mean": 0.25}}\n'
         '{"step": 2, "data": {"actor/loss": 0.0, "critic/score/mean": 0.5}}\n'),
        ("start.txt", "tokens were set to {'eos_token_id': 7}\n{'loss': 0.5, 'reward': 0.25}\n"
         "{'loss': 0.0, 'reward': 0.5}"),
        ("openrlhf.txt", "Global step 1: {'policy_loss': 0.5, 'reward': 0.25, 'return': 0.1}\n"
         "Global step 2: {'policy_loss': 0.0, 'reward': 0.5, 'return': 0.2}\n"),
        ("slime.txt", "rollout 1: {'rollout/raw_reward': 0.25}\nstep 1: {'train/loss': 0.5}\n"
         "rollout 2: {'rollout/raw_reward': 0.5}\nstep 2: {'train/loss': 0.0}\n"),
        ("lines.txt", "Step 1/9 | Average reward: 0.25 | loss 0.5\nStep 2/9 | Average reward: 0.5 | loss 0.0\n"),
        ("verl_lines.txt", "step:1\n - actor/loss:0.5\n - critic/score/mean:0.25\n - timing_s/step:9.5\nstep:2\n"
         " - actor/loss:0.0\n - critic/score/mean:0.5\n"),
        ("equal_signs.log", "INFO step=1 reward=0.25 loss=0.5\nINFO step=2 reward=0.5 loss=0.0\n"),
        ("averages.csv", "step,total_steps,loss,reward_avg\n1,9,0.5,0.25\n2,9,0.0,0.5\n"),
        ("comma.csv", "step;loss;reward\n1;0,5;0,25\n2;0,0;0,5\n"),
        ("percent.csv", "iteration;total_loss;meanReward\n1;0.5;25%\n2;0.0;50%\n"),
        ("markdown.md", "A run.\n\n| Step | Training Loss | reward |\n|---|---|---|\n| 1 | 0.5 | 0.25 |\n"
         "| 2 | 0.0 | 0.5 |\n"),
        ("pandas.txt", "   step  reward_mean  loss\n0     1     0.25   0.5\n1     2      0.5   0.0\n"),
        ("columns.json", '{"step": [1, 2], "loss": [0.5, 0.0], "mean_reward": [0.25, 0.5]}'),
        ("nested.jsonl", '{"step": 1, "loss": 0.5, "reward": {"mean": 0.25}}\n'
         '{"step": 2, "loss": 0.0, "reward": {"mean": 0.5}}\n'),
        ("history.json", '{"model": "m", "history": [{"step": 1, "loss": 0.5, "avg_reward": 0.25}, '
         '{"step": 2, "loss": 0.0, "avg_reward": 0.5}]}'),
        ("samples.jsonl", '{"step": 1, "loss": 0.5, "rewards": [0, 0, 0, 1]}\n'
         '{"step": 2, "loss": 0.0, "rewards": [0, 1]}'),
        ("mlflow.csv", "key,value,step\nloss,0.5,1\nreward,0.25,1\nloss,0.0,2\nreward,0.5,2\n"),
        ("table.log", "| step | 1 |\n| ep_rew_mean | 0.25 |\n| loss | 0.5 |\n-----\n| step | 2 |\n"
         "| ep_rew_mean | 0.5 |\n| loss | 0.0 |\n"),
        ("colors.log", "\x1b[32mstep 1\x1b[0m reward: 0.25 loss: 0.5\n\x1b[32mstep 2\x1b[0m reward: 0.5 loss: 0.0\n"),
        ("two_names.jsonl", '{"step": 1, "loss": 0.5, "return": 0.9, "reward": 0.25}\n'
         '{"step": 2, "loss": 0.0, "return": 0.9, "reward": 0.5}\n'),
        ("accuracy.jsonl", '{"step": 1, "loss": 0.5, "accuracy": 0.25}\n{"step": 2, "loss": 0.0, "accuracy": 0.5}\n'),
    ],
)  # fmt: skip
def test_the_same_run_in_every_format(name, text):
    rows = parse_metrics(text.encode("utf-16" if name == "powershell.txt" else "utf-8"), name)
    kept = [{key: row[key] for key in ("step", "loss", "reward")} for row in rows if "reward" in row]
    assert kept == EXPECTED


def test_tensorboard_and_the_folders_of_runs(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as board:
        for row in EXPECTED:
            for name in ("loss", "reward"):
                board.add_scalar(f"train/{name}", row[name], row["step"])
    assert read_metrics(tmp_path / "tb") == EXPECTED
    for number in (5, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
        state = {"log_history": [{**row, "step": number + row["step"]} for row in EXPECTED]}
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(json.dumps(state))
    assert [row["step"] for row in read_metrics(tmp_path)] == [11, 12]
    assert len(read_metrics(Path(__file__).parent / "old_run")) > 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b" \n", "empty.txt is empty"),
        ("notes.txt", b"Dear diary,\nthe reward was fine.\n", "notes.txt is not a supported log"),
        ("model.bin", b"\x00\x01\x02reward", "model.bin is a binary file"),
        ("events.out.tfevents.1", b"\x00\x01\x02", "events.out.tfevents.1 is not a supported log"),
        ("prices.json", b'[{"price": 1.0, "year": 1}, {"price": 0.5, "year": 2}]',
         "prices.json has no metric that is known among price, year"),
        ("one.jsonl", b'{"reward": 1.0, "step": 1}\n', "this log has one step"),
        ("prose.txt", b"lorem ipsum dolor " * 20_000, "prose.txt is not a supported log"),
        ("deep.json", b"[" * 100_000, "deep.json is not a supported log"),
        ("deep.txt", b"{'reward': " + b"(" * 100_000 + b"}", "deep.txt is not a supported log"),
        ("blanks.json", b'[{"a' + b" " * 200_000 + b'b": 1}]', "blanks.json has no metric that is known"),
        ("digits.txt", b"step" + b"1" * 500_000, "digits.txt is not a supported log"),
        ("long.txt", b"{" + b"1: 1, " * 200_000 + b"}", "long.txt is not a supported log"),
        ("cell.csv", b'step,reward\n1,"' + b"x" * 200_000, "cell.csv is not a supported log"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_said_in_one_sentence(tmp_path, monkeypatch, capsys, name, content, words):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    assert main(["diagnose", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"grpo-edu: error: {words}") and error.count("\n") == 1
    board = LogDiagnosis(name)
    assert board.diagnosis is None and words.replace("'", "&#x27;") in board.message.value


def test_what_is_no_number_for_a_float_and_a_long_text_in_a_cell_cost_only_themselves():
    table = "step,reward,text\n1,0.5,a\n2,0.6," + "x" * 200_000 + "\n3,0.7,c\n"
    assert [row["reward"] for row in parse_metrics(table.encode(), "table.csv")] == [0.5, 0.7]
    records = [{"step": 1, "reward": 0.5, "kl": 10**400, "loss": [10**400]}, {"step": 2, "reward": 0.6}]
    rows = parse_metrics(json.dumps(records).encode(), "huge.json")
    assert rows == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]


def test_a_tensor_of_an_event_file_is_made_only_if_it_is_one_number():
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2

    file = io.BytesIO()
    for step, sizes in enumerate([[], [1], [10**11]], start=1):  # the last has 51 bytes, and would be 373 GiB
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[0.5])
        for size in sizes:
            tensor.tensor_shape.dim.add(size=size)
        summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="reward", tensor=tensor)])
        event = event_pb2.Event(step=step, summary=summary)
        record_writer.RecordWriter(file).write(event.SerializeToString())
    rows = parse_metrics(file.getvalue(), "events.out.tfevents.1")
    assert rows == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}]


def test_code_next_to_a_log_is_not_run_even_if_somebody_would_agree(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    code = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": code}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    with pytest.raises(ValueError, match="tokenizer files are damaged"):
        _find_turn_end(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_file_that_is_not_there_a_folder_without_a_log_and_one_too_large(tmp_path, monkeypatch, capsys):
    assert main(["diagnose", str(tmp_path / "gone.txt")]) == 2 and "gone.txt" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path)]) == 2 and "holds neither" in capsys.readouterr().err
    monkeypatch.setattr("grpo_edu.runs.metric_logs.MOST_BYTES", 10)
    (tmp_path / "long.txt").write_text("{'reward': 0.1}\n" * 3)
    assert main(["diagnose", str(tmp_path / "long.txt")]) == 2 and "larger than" in capsys.readouterr().err


def test_the_command_and_the_dashboard_say_the_same(capsys):
    log = BY_HAND / "reward_0_truncated.csv"
    assert main(["diagnose", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["causes"][0]["fault"] == "length truncation"
    assert main(["diagnose", str(log)]) == 0
    printed = capsys.readouterr().out
    board = LogDiagnosis()
    assert "breaks down" in board.message.value, "it begins with a recorded run"
    assert "32 logged steps: Reward from 0.469 to 0, Completion length from 22.4 to 96" in board.alt
    file = {"name": log.name, "type": "", "size": 1, "last_modified": 0}
    board.file.set_state({"value": [{**file, "content": memoryview(log.read_bytes())}]})  # as the page does
    assert board.example.value == "" and "<img" in board.picture.value
    printed = " ".join(printed.split())
    for text in (found["findings"][0]["sees"], *found["normal"]):
        assert text in printed and marked_text(text) in board.report.value
    board.file.set_state({"value": [{**file, "content": memoryview(b"\0")}]})
    assert board.diagnosis is None and "binary" in board.message.value and not board.report.value


def test_a_table_of_two_runs_is_refused():
    table = b'"Step","a - train/reward","b - train/reward"\n1,0.5,0.1\n2,0.6,0.1\n'
    with pytest.raises(ValueError, match=r"reward of 2 runs \(a, b\); export one run alone"):
        parse_metrics(table, "wandb.csv")
