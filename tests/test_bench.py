"""The row that compares machines: measured here, written once into a table, and honest about what was left out."""

import json
from functools import partial
from pathlib import Path

import pytest

from grpo_edu.cli.main import main
from grpo_edu.config import GRPOConfig
from grpo_edu.fast.memory_estimate import shape_config
from grpo_edu.machine import bench
from grpo_edu.machine.bench import COLUMNS, add_row, machine_row, machine_text, report_text

DOCS = Path(__file__).resolve().parents[1] / "docs" / "measured.md"
FOUND = {
    "cpu_model": "Some | CPU",
    "usable_cores": 1.5,
    "memory_total_gib": 7.8,
    "torch": "2.13.0+cpu",
    "instruction_sets": ["avx2", "avx512_f"],
    "rollout_tokens_per_second": 12345,
    "training_steps_per_second": 2.5,
    "peak_gib": 0.71,
    "decode_ms": {"float32": 341.6, "bfloat16": 130.2},
    "decode_skipped": "",
    "load_before": 0.25,
}


@pytest.mark.parametrize(("name", "millions"), [("494M", 494), ("1.5B", 1544)])
def test_a_shape_has_the_parameters_of_its_name(name, millions):
    from grpo_edu.fast.memory_estimate import empty_model

    assert round(empty_model(shape_config(name)).num_parameters() / 1e6) == millions


def test_an_unknown_shape_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="shape: '7B' is unknown; choose one of 494M, 1.5B"):
        shape_config("7B")


def test_a_row_has_a_cell_a_column_and_no_bar_inside_one():
    row = machine_row(FOUND)
    assert list(row.values()) == [
        "Some / CPU",
        "1.5",
        "8",
        "2.13.0+cpu",
        "avx2, avx512_f",
        "12,345",
        "2.50",
        "0.71",
        "342",
        "130",
        "0.2",
    ]
    head, rule, line = report_text(FOUND).splitlines()
    assert {len(text.split("|")) for text in (head, rule, line)} == {len(COLUMNS) + 2}


def test_what_was_left_out_is_said():
    short = {**FOUND, "decode_ms": None, "decode_skipped": "1.1 GiB are available, 2 are needed"}
    assert list(machine_row(short).values())[-3:-1] == ["—", "—"]
    assert machine_text(short).splitlines()[-1].startswith("The 494M shape was left out: 1.1 GiB")


def test_a_machine_has_one_row_in_a_table(tmp_path):
    file = tmp_path / "table.md"
    head, rule, _ = report_text(FOUND).splitlines()
    file.write_text(f"# Machines\n\n{head}\n{rule}\n\nAfterwards.\n")
    assert add_row(file, FOUND) is False
    assert add_row(file, {**FOUND, "cpu_model": "Another"}) is False
    assert add_row(file, {**FOUND, "rollout_tokens_per_second": 99}) is True
    lines = file.read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[4:6]] == ["Some / CPU", "Another"]
    assert "| 99 |" in lines[4] and lines[-1] == "Afterwards."


def test_a_file_without_the_table_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "no.md").write_text("# Nothing\n")
    with pytest.raises(ValueError, match="no.md has no table"):
        add_row(tmp_path / "no.md", FOUND)
    for line in (["--report", str(tmp_path / "none.md")], ["--report", str(tmp_path / "no.md")], ["--rounds", "0"]):
        assert main(["bench", *line]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_this_machine_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench, "memory_bytes", lambda: (2**33, 2**30))  # too little for the large shape
    monkeypatch.setattr(bench, "GRPOConfig", partial(GRPOConfig, prompts_per_step=2))
    assert main(["bench", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollout_tokens_per_second"] > 100
    assert found["training_steps_per_second"] > 0.01
    assert 0.3 < found["peak_gib"] < 8
    assert found["decode_ms"] is None and "1.0 GiB are available" in found["decode_skipped"]


def test_the_guide_has_the_table_that_the_command_fills():
    head, rule, _ = report_text(FOUND).splitlines()
    text = DOCS.read_text(encoding="utf-8")
    assert f"{head}\n{rule}\n| " in text
