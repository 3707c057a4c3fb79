"""Problems in and out of files: round trips, and a word with file and line for whatever is wrong."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_edu.problems import files as data
from grpo_edu.problems import templates
from grpo_edu.problems.files import load_gsm8k, load_problems, read_problems, to_dataset, write_problems
from grpo_edu.problems.templates import Problem, data_dir

PROBLEM = Problem("What is 2 + 3?", "5", "basic", "2 + 3 = 5. #### 5")
OTHER = Problem("Wie groß ist 1\u20284 − 3?", "1", "basic", '"a"\n#### 1')
LINE = '{"prompt": "p", "answer": "5", "level": "basic", "solution": "#### 5"}'


def test_write_then_read(tmp_path):
    path = tmp_path / "new" / "mine.jsonl"
    write_problems(path, iter([PROBLEM, OTHER]))
    assert read_problems(path) == [PROBLEM, OTHER]
    assert json.loads(path.read_text(encoding="utf-8").split("\n")[0]) == {
        "prompt": "What is 2 + 3?",
        "answer": "5",
        "level": "basic",
        "solution": "2 + 3 = 5. #### 5",
    }
    assert [entry.name for entry in path.parent.iterdir()] == ["mine.jsonl"]


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(st.lists(st.builds(Problem, text, text, text, text), min_size=1, max_size=4))
def test_any_problems_round_trip(tmp_path_factory, problems):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write_problems(path, problems)
    assert read_problems(path) == problems


def test_blank_lines_windows_ends_and_other_fields_are_no_fault(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(("\ufeff" + LINE + "\r\n\r\n" + LINE.replace("{", '{"id": 3, ') + "\n").encode())
    assert read_problems(path) == [Problem("p", "5", "basic", "#### 5")] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad\.jsonl:2: this line is not JSON \(.*\); repair or remove it"),
        ("{} {}", r"bad\.jsonl:2: this line is not JSON"),
        ("[1]", r"bad\.jsonl:2: expected a JSON object in braces, got list"),
        (LINE.replace("answer", "anwser"), r"bad\.jsonl:2: the field 'answer' is missing; each line needs prompt, ans"),
        (LINE.replace('"5"', "5"), r"bad\.jsonl:2: the field 'answer' must be a string, got int; put it in quotes"),
        (LINE.replace('"5"', r'"\ud83d"'), r"bad\.jsonl:2: the field 'answer' contains .*ud83d.*Unicode.*remove"),
        (LINE.replace('"5"', "null"), r"bad\.jsonl:2: the field 'answer' must be a string, got NoneType"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(LINE + "\n" + line + "\n" + LINE + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_problems(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(LINE.encode() + b"\n" + LINE.replace("p", "\xe9").encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: the byte 0x.. is not UTF-8"):
        read_problems(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_in_each_way(tmp_path, end):
    path = tmp_path / "problems.jsonl"
    path.write_bytes((LINE + end + LINE).encode())
    assert len(read_problems(path)) == 2


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file holds no problems"):
        read_problems(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.jsonl"):
        read_problems(tmp_path / "absent.jsonl")


FULL = OSError(errno.ENOSPC, "No space left on device")
FULL_SAYS = r"No space left.*unchanged.*[Ff]ree space.*mine\.jsonl"


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [(Path, "write_text", FULL, FULL_SAYS), (os, "replace", FULL, FULL_SAYS), (os, "replace", KeyboardInterrupt(), "")],
)
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, owner, name, error, message):
    path = tmp_path / "mine.jsonl"
    write_problems(path, [PROBLEM])
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=error))
        with pytest.raises(type(error), match=message) as caught:
            write_problems(path, [OTHER])
    assert getattr(caught.value, "errno", None) == getattr(error, "errno", None)
    assert read_problems(path) == [PROBLEM]
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.jsonl"]


def test_write_problems_refuses_nothing_and_something_else(tmp_path):
    with pytest.raises(ValueError, match="problems is empty"):
        write_problems(tmp_path / "mine.jsonl", [])
    with pytest.raises(ValueError, match=r"problems\[1\] must be a Problem, got dict"):
        write_problems(tmp_path / "mine.jsonl", [PROBLEM, {"prompt": "p"}])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A data folder of two levels, three and two problems."""
    for level, split, count in [("basic", "train", 3), ("sorting", "train", 2), ("basic", "heldout", 1)]:
        problems = [Problem(f"{level} {split} {i}", str(i), level, f"#### {i}") for i in range(count)]
        write_problems(tmp_path / "problems" / f"{level}_{split}.jsonl", problems)
    monkeypatch.setattr(data, "data_dir", lambda: tmp_path)
    return tmp_path


def test_load_problems(shipped):
    assert [p.prompt for p in load_problems("basic")] == ["basic train 0", "basic train 1", "basic train 2"]
    assert [p.prompt for p in load_problems("basic", "heldout")] == ["basic heldout 0"]
    both = load_problems(("basic", "sorting"), "train", n=2)
    assert [p.prompt for p in both] == ["basic train 0", "basic train 1", "sorting train 0", "sorting train 1"]


def test_load_problems_refuses(shipped):
    with pytest.raises(ValueError, match="level must be .*basic, intermediate, advanced, .*; got 'hard'"):
        load_problems("hard")
    with pytest.raises(ValueError, match="level must be"):
        load_problems(["basic", "hard"])
    with pytest.raises(ValueError, match="level must be"):
        load_problems([])
    with pytest.raises(ValueError, match="split must be one of train, heldout; got 'test'"):
        load_problems("basic", "test")
    for n in (0, -1, 4):
        with pytest.raises(ValueError, match="n must be .*1 and 3"):
            load_problems("basic", n=n)


def test_data_dir_of_a_checkout_and_of_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "grpo_edu"
    package.mkdir()
    monkeypatch.setattr(templates, "__file__", str(package / "problems" / "templates.py"))
    assert data_dir() == package / "_data"
    (tmp_path / "data" / "problems").mkdir(parents=True)
    assert data_dir() == tmp_path / "data"


GSM8K_LINE = json.dumps(
    {"question": "Clips?", "answer": "48/2 = <<48/2=24>>24 in May.\nAll: 48+1,152 = $<<48+1152=1200>>1,200\n#### 1,200"}
)


def test_a_gsm8k_record_becomes_a_problem(tmp_path):
    expected = Problem("Clips?", "1200", "gsm8k", "48/2 = 24 in May.\nAll: 48+1,152 = $1,200\n#### 1,200")
    (tmp_path / "test.jsonl").write_text(GSM8K_LINE + "\n")
    assert load_gsm8k("test", tmp_path) == [expected]
    assert load_gsm8k("test", str(tmp_path / "test.jsonl")) == [expected]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GSM8K_LINE.replace("####", "##"), r"train\.jsonl:2: .*'#### number'"),
        (GSM8K_LINE.replace("#### 1,200", "#### 5 or 6"), r"train\.jsonl:2: the answer"),
        (GSM8K_LINE[:-1], r"train\.jsonl:2: this line is not JSON"),
        (GSM8K_LINE.replace("question", "prompt"), r"train\.jsonl:2: the field 'question' is missing"),
    ],
)
def test_a_bad_gsm8k_line_is_named(tmp_path, line, message):
    (tmp_path / "train.jsonl").write_text(GSM8K_LINE + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_gsm8k("train", tmp_path)


def test_load_gsm8k_refuses(tmp_path):
    (tmp_path / "test.jsonl").write_text(GSM8K_LINE + "\n")
    with pytest.raises(FileNotFoundError, match=r"file .*train\.jsonl does not exist.*train\.jsonl"):
        load_gsm8k("train", tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        load_gsm8k("train", tmp_path / "absent")
    with pytest.raises(ValueError, match="split must be one of train, test; got 'heldout'"):
        load_gsm8k("heldout", tmp_path)
    with pytest.raises(ValueError, match="n must be .*1 and 1"):
        load_gsm8k("test", tmp_path, n=2)


@pytest.mark.slow
def test_without_a_network_the_way_out_is_named():
    with pytest.raises(ConnectionError, match="github.com/openai/grade-school-math.*name that folder as `path`"):
        load_gsm8k("test")


def test_all_of_gsm8k(gsm8k_dir):
    train, test = load_gsm8k("train", gsm8k_dir), load_gsm8k("test", gsm8k_dir)
    assert (len(train), len(test)) == (7473, 1319)
    assert (train[0].answer, test[0].answer) == ("72", "18")
    assert load_gsm8k("test", gsm8k_dir, n=5) == test[:5]
    for problem in train + test:
        assert problem.level == "gsm8k"
        assert problem.answer == str(int(problem.answer))
        assert "<<" not in problem.solution and ">>" not in problem.solution
        assert int(problem.solution.split("####")[1].replace(",", "")) == int(problem.answer)


def test_to_dataset():
    dataset = to_dataset(iter([PROBLEM, OTHER]))
    assert dataset.column_names == ["prompt", "answer", "level", "solution"]
    assert dataset[1]["solution"] == OTHER.solution
    assert len(dataset) == 2
    later = to_dataset([PROBLEM, replace(OTHER, columns={"unit": "cm"})])  # a column that the first problem lacks
    assert later["unit"][:] == [None, "cm"]
