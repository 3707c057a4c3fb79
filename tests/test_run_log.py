"""A run log that a kill cannot spoil."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.runs.log import RunLog, read_log

NAN = math.nan


def test_a_record_comes_back_with_null_for_what_json_lacks(tmp_path):
    record = {
        "step": np.int64(1),
        "reward": torch.tensor(0.5),
        "kl": NAN,
        "grad_norm": -math.inf,
        "note": "zwölf",
        "done": False,
        "more": {"values": (1, np.float32(NAN), None)},
    }
    path = tmp_path / "deep" / "metrics.jsonl"
    with RunLog(path) as log:
        log.append(record)
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    assert read_log(path) == [
        {
            "step": 1,
            "reward": 0.5,
            "kl": None,
            "grad_norm": None,
            "note": "zwölf",
            "done": False,
            "more": {"values": [1, None, None]},
        }
    ]


def test_each_line_is_readable_at_once_and_a_second_log_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with RunLog(path) as log:
        log.append({"step": 1})
        assert read_log(path) == [{"step": 1}]
    with RunLog(path) as log:
        log.append({"step": 2})
    log.close()
    assert read_log(path) == [{"step": 1}, {"step": 2}]


@given(st.integers(0, 60))
def test_a_log_cut_at_any_byte_reads_and_goes_on(tmp_path_factory, cut):
    lines = [json.dumps({"step": step, "reward": step / 3}).encode() + b"\n" for step in (1, 2)]
    content = b"".join(lines)[:cut]
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    path.write_bytes(content)
    # a line counts once its last brace is there, with or without the newline
    whole = sum(len(b"".join(lines[:count])) - 1 <= cut for count in (1, 2))
    assert [record["step"] for record in read_log(path)] == [1, 2][:whole]
    with RunLog(path) as log:
        log.append({"step": 9})
    assert [record["step"] for record in read_log(path)] == [*[1, 2][:whole], 9]


@pytest.mark.parametrize("bad", [b'{"step": 1', b"[1]", b"", b"3", b'{"note": "\xff"}', b"\x00"])
def test_a_bad_line_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON object"):
        read_log(path)


def test_a_link_to_another_file_is_refused_and_that_file_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("a last line without an end")
    (tmp_path / "metrics.jsonl").symlink_to("notes.txt")
    with pytest.raises(OSError, match=r"is a link.*metrics.jsonl"):
        RunLog(tmp_path / "metrics.jsonl")
    assert (tmp_path / "notes.txt").read_text() == "a last line without an end"


def test_an_empty_log_and_none(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert read_log(tmp_path / "empty.jsonl") == []
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "none.jsonl")


WRITER = """
import sys
from grpo_edu.runs.log import RunLog
with RunLog(sys.argv[1]) as log:
    step = 0
    while True:
        step += 1
        log.append({"step": step, "text": "x" * 5000})
        print(step, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kill -9 needs a POSIX system")
def test_a_killed_run_leaves_every_line_it_reported(tmp_path):
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        reported = 20 + len(process.stdout.read().splitlines())
    assert process.returncode == -signal.SIGKILL
    steps = [record["step"] for record in read_log(path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) in (reported, reported + 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_names_the_file():
    with RunLog("/dev/full") as log, pytest.raises(OSError, match="No space left.*free some space") as caught:
        log.append({"step": 1})
    assert caught.value.filename == "/dev/full"
