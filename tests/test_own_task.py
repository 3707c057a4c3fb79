"""A task of your own: problems from a file, a reward from a file, and what is said about those that are not valid."""

import gzip
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from random_policy import byte_tokenizer, random_model

from grpo_edu.cli.main import main
from grpo_edu.config import GRPOConfig
from grpo_edu.evaluation import evaluate
from grpo_edu.models import load_policy, save_policy
from grpo_edu.problems.hub import read_run_config
from grpo_edu.problems.own import load_user_problems, question_key
from grpo_edu.problems.templates import Problem, reward_columns, scorer_of_level
from grpo_edu.prompts import render_prompt
from grpo_edu.rewards import accuracy_reward, compute_rewards
from grpo_edu.runs.completions import CompletionLog, by_reward, read_completions
from grpo_edu.runs.export import model_card
from grpo_edu.runs.loading import load_split
from grpo_edu.runs.log import read_log
from grpo_edu.runs.look import first_look
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.record import RunMetadata
from grpo_edu.runs.run import open_policy, run_evaluation
from grpo_edu.runs.user_rewards import load_reward
from grpo_edu.scale.trl_backend import train_with_trl
from grpo_edu.studies.exploits import attempts

SUMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "unit": "cm"} for n in range(20)]
SECRET = "KEY = 'sk-secret'\n\n\n"
REWARD = "def mine(completions, unit, **kwargs):\n    return [float(len(c) % 3) for c, u in zip(completions, unit)]\n"


def write(path: Path, content) -> Path:
    """Write bytes, a text, or rows as JSON lines."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.write_text(text, encoding="utf-8")
    return path


def as_csv(rows) -> str:
    lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    return "\n".join(lines)


@pytest.fixture(params=["jsonl", "json", "csv", "tsv", "parquet", "folder", "saved"])
def table(request, tmp_path):
    """The same twenty sums in every kind of file."""
    from datasets import Dataset

    kind, path = request.param, tmp_path / f"sums.{request.param}"
    if kind == "jsonl":
        return write(path, SUMS)
    if kind == "json":
        return write(path, json.dumps(SUMS))
    if kind in ("csv", "tsv"):
        text = as_csv(SUMS)
        return write(path, "\ufeff" + (text if kind == "csv" else text.replace(",", "\t")))
    if kind == "parquet":
        Dataset.from_list(SUMS).to_parquet(path)
        return path
    folder = tmp_path / "sums"
    if kind == "saved":
        Dataset.from_list(SUMS).save_to_disk(folder)
    else:
        folder.mkdir()
        write(folder / "train.jsonl", SUMS)
    return folder


def test_every_kind_of_file_gives_the_same_problems(table):
    train, heldout = (load_user_problems(table, split) for split in ("train", "heldout"))
    assert len(train) == 16 and len(heldout) == 4
    assert {(p.prompt, p.answer) for p in train + heldout} == {(row["question"], row["answer"]) for row in SUMS}
    assert all(problem.level == "sums" and problem.columns == {"unit": "cm"} for problem in train + heldout)
    shuffled = write(table.parent / "again.jsonl", list(reversed(SUMS)))
    assert {p.prompt for p in load_user_problems(shuffled, "heldout")} == {p.prompt for p in heldout}


def test_columns_are_mapped_and_two_files_stay_apart(tmp_path):
    rows = [{"problem text": row["question"], "target": f"So #### {row['answer']}"} for row in SUMS]
    train, held = write(tmp_path / "a.jsonl", rows[:15]), write(tmp_path / "b.jsonl", rows[15:])
    columns = ("question=problem text", "answer=target")
    problems = load_user_problems(train, "train", heldout=held, columns=columns)
    assert len(problems) == 15 and problems[3].answer == "6" and problems[3].solution == "So #### 6"
    assert len(load_split((str(train),), heldout_file=held, columns=columns, n=300)) == 5  # fewer than asked for
    write(held, [*rows[15:], {"problem text": " what is 3 + 3?", "target": "6"}])
    with pytest.raises(ValueError, match=r"b\.jsonl:6: .*what is 3 \+ 3.*training"):
        load_user_problems(train, "train", heldout=held, columns=columns)


def test_a_repeated_question_is_never_on_both_sides(tmp_path):
    path = write(tmp_path / "twice.jsonl", SUMS + SUMS)
    train, heldout = load_user_problems(path, "train"), load_user_problems(path, "heldout")
    assert len(train) == 32 and len(heldout) == 4
    assert not {question_key(p.prompt) for p in train} & {question_key(p.prompt) for p in heldout}


def test_prompts_of_messages_are_read_as_trl_and_verl_write_them(tmp_path):
    trl = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(10)]
    system = {"role": "system", "content": "Be short."}
    verl = [
        {"prompt": [system, *row["prompt"]], "reward_model": {"style": "rule", "ground_truth": row["answer"]}}
        for row in trl
    ]
    first, second = (
        load_user_problems(write(tmp_path / f"{n}.jsonl", rows), "train") for n, rows in enumerate((trl, verl))
    )
    assert {(problem.prompt, problem.answer) for problem in first} < {(f"{n}?", str(n)) for n in range(10)}
    assert all(problem.prompt == f"Be short.\n\n{problem.answer}?" for problem in second) and len(second) == 8


def test_an_empty_solution_and_a_level_that_is_a_number_do_not_stop_a_file(tmp_path):
    rows = [{**row, "solution": None, "level": 1.5} for row in SUMS]
    problem = load_user_problems(write(tmp_path / "a.jsonl", rows), "train")[0]
    assert problem.level == "1.5" and problem.solution == f"#### {problem.answer}"


TEXTS = {
    "New York.": (["#### new  york", "so\n#### New York."], ["#### York", "New York", "#### New York or Rome"]),
    "New Delhi": (['#### **"New Delhi."**', "#### `New Delhi`"], ["#### New 'Delhi", "#### New"]),
    "S\u00e3o Tom\u00e9": (["#### sa\u0303o tome\u0301"], ["#### Sao Tome"]),
    "2026-03-05": (["#### 2026-03-05"], ["#### 2026-03-06", "#### 2026", "#### 2026-03-05 2026-03-06"]),
    '{"a": 1}': (['#### {"a": 1}', '#### {"a":\n 1}'], ['#### {"a": 2}']),
    "SELECT a FROM b": (["#### select a from b"], ["#### select a"]),
}


@pytest.mark.parametrize("answer", TEXTS)
def test_an_answer_that_is_no_number_is_compared_as_a_text(tmp_path, answer):
    path = write(tmp_path / "a.jsonl", [{"question": f"{n}?", "answer": answer} for n in range(6)])
    problem = load_user_problems(path, "train")[0]
    right, wrong = TEXTS[answer]
    columns = reward_columns([problem] * len(right + wrong))
    rewards = compute_rewards(
        accuracy_reward, prompts=[problem.prompt] * len(right + wrong), completions=right + wrong, **columns
    )
    assert rewards[:, 0].tolist() == [1.0] * len(right) + [0.0] * len(wrong)
    scorer = scorer_of_level(problem.level)
    scores = [scorer.score(text, problem.prompt, problem.level, problem.answer) for text in right + wrong]
    assert scores == rewards[:, 0].tolist()


QUESTION, GOOD = '{"question": "1 + 1?", "answer": "2"}\n', SUMS
# What is wrong → the file's name, what it holds, further options, and words that the message must have.
BAD_FILES = {
    "missing": ("gone.jsonl", None, (), ("gone.jsonl", "does not exist")),
    "empty": ("a.jsonl", "", (), ("a.jsonl", "no problems")),
    "one question": ("a.jsonl", QUESTION, (), ("a.jsonl", "at least two")),
    "not JSON": ("a.jsonl", QUESTION + "{oops\n", (), ("a.jsonl:2", "JSON")),
    "a list per line": ("a.jsonl", QUESTION + "[1]\n", (), ("a.jsonl:2", "list")),
    "bytes that are not text": ("a.jsonl", b'\xff\xfe{"question"', (), ("a.jsonl:1", "UTF-8")),
    "one object as .json": ("a.json", "{}", (), ("a.json", "list of JSON objects")),
    "lines as .json": ("a.json", QUESTION * 2, (), ("a.json:2", ".jsonl")),
    "another kind": ("a.xlsx", "PK", (), ("a.xlsx", ".jsonl", ".csv")),
    "no question": ("a.jsonl", [{"q": "1?", "answer": "1"}] * 2, (), ("a.jsonl:1", "question", "q, answer")),
    "question is a number": ("a.jsonl", [{"question": 7, "answer": "1"}] * 2, (), ("a.jsonl:1", "text", "int")),
    "question is empty": ("a.jsonl", [{"question": " ", "answer": "1"}] * 2, (), ("a.jsonl:1", "empty")),
    "question is a chat": ("a.jsonl", [{"prompt": [{"role": "user"}], "answer": "1"}] * 2, (), ("a.jsonl:1", "list")),
    "half a character": ("a.jsonl", '{"question": "\\ud800", "answer": 1}\n' + QUESTION, (), ("a.jsonl:1", "half")),
    "answer is null": (
        "a.jsonl",
        [*SUMS, {"question": "?", "answer": None, "unit": "cm"}],
        (),
        ("a.jsonl:21", "answer", "None"),
    ),
    "answer is a list": (
        "a.jsonl",
        [{"question": f"{n}?", "answer": ["a", "b"]} for n in range(9)],
        (),
        ("a.jsonl:1", "list", "another name", "reward of your own"),
    ),
    "answer is empty": ("a.jsonl", [*SUMS, {"question": "?", "answer": "", "unit": "cm"}], (), ("a.jsonl:21", "empty")),
    "answers are formulas": (
        "a.jsonl",
        [*SUMS, *({"question": f"{text}?", "answer": text, "unit": "cm"} for text in ("9\\pi", r"(5,\infty)", "3√2"))],
        (),
        ("3 of 23 answers", "a.jsonl:21", "pi", "a.jsonl:22", "infty", "a.jsonl:23"),
    ),
    "question is a conversation": (
        "a.jsonl",
        [{"prompt": [{"role": role, "content": "?"} for role in ("user", "assistant", "user")], "answer": 1}] * 2,
        (),
        ("a.jsonl:1", "one user message"),
    ),
    "no answer, no reward": ("a.jsonl", [{"question": f"{n}?"} for n in range(9)], (), ("answer", "--rewards")),
    "answer missing in a row": (
        "a.jsonl",
        [*SUMS, {"question": "?", "anwser": "3", "unit": "cm"}],
        ("--rewards", "r.py:mine"),
        ("a.jsonl:21", "'answer'", "20 of 21"),
    ),
    "column missing in a row": (
        "a.jsonl",
        [*SUMS, {"question": "?", "answer": "3"}],
        (),
        ("a.jsonl:21", "'unit'", "null"),
    ),
    "a name that is taken": ("a.jsonl", [{**row, "completions": 1} for row in SUMS], (), ("completions", "rename")),
    "CSV without a header": ("a.csv", '"1 + 1?",2\n"2 + 2?",4\n', (), ("a.csv:2", "question")),
    "CSV with a torn row": ("a.csv", "question,answer\n1?,1\n2?\n", (), ("a.csv:3", "1 values", "2 columns")),
    "CSV with a comma too many": ("a.csv", "question,answer\n1,2?,3\n", (), ("a.csv:2", "3 values", "quotes")),
    "CSV in Latin-1": ("a.csv", "question,answer\ncafé?,1\n".encode("latin-1"), (), ("a.csv", "UTF-8")),
    "CSV with two equal names": ("a.csv", "question,question\n1?,1\n", (), ("a.csv:1", "once")),
    "CSV with an open quote": ("a.csv", 'question,answer\n"1?,1\n', (), ("a.csv", "CSV")),
    "not Parquet": ("a.parquet", "question", (), ("a.parquet", "Parquet")),
    "a column that is missing": ("a.jsonl", GOOD, ("--columns", "question=text"), (":1", "question=text", "unit")),
    "a field that is unknown": ("a.jsonl", GOOD, ("--columns", "query=question"), ("--columns", "query=question")),
    "a mapping without =": ("a.jsonl", GOOD, ("--columns", "question"), ("--columns", "FIELD=COLUMN")),
    "held-out file missing": ("a.jsonl", GOOD, ("--heldout", "gone.csv"), ("gone.csv", "does not exist")),
    "held-out file is the file": ("a.jsonl", GOOD, ("--heldout", "a.jsonl"), ("a.jsonl:1", "training question")),
    "too few for a step": ("a.jsonl", GOOD[:5], (), ("--prompts-per-step", "4")),
    "more than there are": ("a.jsonl", GOOD, ("--num-problems", "99"), ("--num-problems", "16")),
}
TOP = "def mine(completions, **kwargs):\n    "
# What is wrong → the file, the name of the reward, and words that the message must have.
BAD_REWARDS = {
    "missing file": (None, "mine", ("r.py", "does not exist")),
    "missing function": (TOP + "return []", "other", ("other", "does not exist", "mine")),
    "a number": ("mine = 3", "mine", ("mine", "not a function")),
    "a class": ("class mine:\n    pass", "mine", ("mine", "not a function")),
    "a syntax error": ("def mine(:\n", "mine", ("r.py:1", "syntax")),
    "an import that fails": ("import no_such_library", "mine", ("no_such_library",)),
    "an error on import": ("1 / 0", "mine", ("ZeroDivisionError",)),
    "an exit on import": ("raise SystemExit(3)", "mine", ("SystemExit",)),
    "no **kwargs": ("def mine(completions):\n    return []", "mine", ("mine", "**kwargs")),
    "a column that is missing": ("def mine(completions, unt, **kwargs):\n    return []", "mine", ("unt", "unit")),
    "raises": (TOP + "return [1 / (c != kwargs['completions2']) for c in completions]", "mine", ("mine", "KeyError")),
    "returns None": (TOP + "return None", "mine", ("mine", "NoneType")),
    "returns one number": (TOP + "return 1.0", "mine", ("mine", "float")),
    "returns too few": (TOP + "return [1.0]", "mine", ("mine", "1 rewards", "2 completions")),
    "returns texts": (TOP + "return ['1'] * len(completions)", "mine", ("mine", "'1'", "completion 0")),
    "returns NaN": (TOP + "return [float('nan')] * len(completions)", "mine", ("mine", "nan", "completion 0")),
    "returns infinity": (TOP + "return [float('inf')] * len(completions)", "mine", ("mine", "inf", "completion 0")),
    "a matrix": (TOP + "import torch\n    return torch.ones(len(completions), 2)", "mine", ("mine", "completion 0")),
    "None for all": (TOP + "return [None] * len(completions)", "mine", ("mine", "None")),
    "two of one name": (TOP + "return []", "mine,other.py:mine", ("mine, mine",)),
}


BAD_PROMPTS = {
    "a file that is missing": (("--system-prompt", "gone.txt"), ("--system-prompt", "gone.txt", "does not exist")),
    "an empty text": (("--system-prompt", " "), ("--system-prompt", "none")),
    "with a plain template": (
        ("--system-prompt", "x", "--prompt-template", "{problem}"),
        ("--system-prompt", "no effect"),
    ),
    "no variable": (("--chat-template-kwargs", "thinking"), ("--chat-template-kwargs", "name=value")),
    "a variable without effect": (("--chat-template-kwargs", "thinking=false"), ("--chat-template-kwargs", "thinking")),
    "more examples than problems": (("--num-examples", "99"), ("--num-examples", "99", "16")),
    "no number": (("--num-examples", "-1"), ("--num-examples", "-1")),
    "completions": (("--keep-completions", "-1"), ("--keep-completions", "-1")),
}


@pytest.fixture
def refused(policy_dir, tmp_path, monkeypatch, capsys):
    """Call `grpo-edu train` with bad input; returns its one line of error after a look at what is left."""
    monkeypatch.chdir(tmp_path)

    def call(*options: str) -> str:
        before = set(tmp_path.rglob("*"))
        output = tmp_path / "run"
        code = main(["train", "--model", str(policy_dir), "--output", str(output), "--n", "2", "--no-greedy", *options])
        assert (
            code in (1, 2)
            and not output.exists()
            and {p for p in tmp_path.rglob("*") if "pycache" not in str(p)} == before
        )
        errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
        assert len(errors) == 1
        return errors[0]

    return call


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_clear_sentence_and_loses_nothing(refused, tmp_path, case):
    name, content, options, words = BAD_FILES[case]
    if content is not None:
        write(tmp_path / name, content)
    message = refused("--data", name, *options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_one_clear_sentence_and_loses_nothing(refused, tmp_path, case):
    options, words = BAD_PROMPTS[case]
    write(tmp_path / "sums.jsonl", SUMS)
    message = refused("--data", "sums.jsonl", *options)
    assert all(word in message for word in words), message


@pytest.fixture
def without_system(tmp_path):
    """The folder of a policy whose chat template refuses a system message."""
    tokenizer = byte_tokenizer()
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template + "{% if loud %}LOUD{% endif %}"
    save_policy(random_model(tokenizer, stop_ids=range(0, 256, 16)), tokenizer, tmp_path / "gemma")
    return tmp_path / "gemma"


SMALL = (
    "--steps",
    "3",
    "--prompts-per-step",
    "2",
    "--num-generations",
    "4",
    "--max-completion-length",
    "8",
    "--no-greedy",
)


def test_the_prompt_is_shown_stored_and_travels_with_the_model(without_system, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    run = ["train", "--model", str(without_system), "--data", "sums.jsonl", "--output", "run", *SMALL]
    assert main(run) == 2
    assert "--system-prompt to none" in capsys.readouterr().err and not (tmp_path / "run").exists()
    prompt = ("--system-prompt", "none", "--num-examples", "2", "--chat-template-kwargs", "loud=true")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main([*run, *prompt]) == 0
    look = (tmp_path / "run" / "first_look.txt").read_text()
    assert look in capsys.readouterr().err
    policy, tokenizer = load_policy(tmp_path / "run" / "model")
    train = RunConfig(data=("sums.jsonl",), num_examples=2).load_data().problems
    rendered = render_prompt(tokenizer, train[0].prompt)
    assert rendered in look and rendered.count("#### ") == 2 and rendered.endswith("LOUD")
    assert "every prompt: the first 2 of the training problems" in look
    assert "14 to train on, 4 held out" in look and "'<|im_end|>'" in look
    assert read_completions(tmp_path / "run")[0].prompt.startswith(rendered.partition(train[0].prompt)[0])


def test_the_first_look_names_questions_with_several_answers(policy_dir, tmp_path):
    path = write(tmp_path / "sums.jsonl", SUMS + [{**row, "answer": "7"} for row in SUMS])
    config = RunConfig(str(policy_dir), data=(str(path),), num_heldout=2)
    data, (policy, tokenizer) = config.load_data(), open_policy(RunMetadata.start(config))
    look = first_look(config, data.problems, data.heldout, policy, tokenizer)
    assert "Warning: 16 of the questions to train on occur with different answers" in look
    assert "2 held out (one in 5 questions of sums.jsonl, chosen by their hashes, at most 2 of them)" in look
    config = RunConfig(str(policy_dir), data=(str(write(tmp_path / "twice.jsonl", SUMS + SUMS)),))
    data = config.load_data()
    look = first_look(config, data.problems, data.heldout, policy, tokenizer)
    assert "Warning" not in look and "at most" not in look


@pytest.mark.slow
def test_the_system_prompt_of_a_file_reaches_trl_too(policy_dir, tmp_path):
    text = write(tmp_path / "short.txt", "Answer with one number.")
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    request = RunConfig(str(policy_dir), data=(str(tmp_path / "sums.jsonl"),), system_prompt=str(text), num_examples=1)
    policy, tokenizer = open_policy(RunMetadata.start(request))
    problems = request.load_data().problems
    config = GRPOConfig(prompts_per_step=2, num_generations=4, max_completion_length=8, max_steps=1)
    seen = {}
    list(train_with_trl(policy, tokenizer, problems, accuracy_reward, config, on_sampled=seen.update))
    assert set(seen["prompt"]) <= {render_prompt(tokenizer, problem.prompt) for problem in problems}
    assert "Answer with one number." in seen["prompt"][0] and len(seen["advantage"]) == 8
    assert {len(seen[name]) for name in ("prompt", "completion", "reward", "truncated")} == {8}
    assert len(seen["rewards"]["accuracy_reward"]) == 8


@pytest.mark.parametrize(
    ("most", "rows"), [(24, {1: 8, 2: 8, 3: 8}), (13, {1: 4, 2: 4, 3: 4}), (9, {1: 4, 3: 4}), (3, {3: 3}), (0, {})]
)
def test_completions_are_kept_up_to_a_bound_and_a_torn_end_is_left_out(tmp_path, most, rows):
    config = GRPOConfig(num_generations=4, prompts_per_step=2, max_steps=3)
    columns = {name: list(range(8)) for name in ("prompt", "completion", "reward", "advantage", "truncated")}
    columns["rewards"] = {"mine": [0.5] * 8}

    def steps() -> dict[int, int]:
        found = {}
        for step in (1, 2, 3):
            with suppress(ValueError):
                found[step] = len(read_completions(tmp_path, step))
        return found

    path = tmp_path / "completions.jsonl.gz"
    with CompletionLog(path, most, config) as log:
        for step in (1, 2, 3):
            log.append(step, columns)
    assert steps() == rows
    if rows:
        path.write_bytes(path.read_bytes()[:-30])
        assert steps() == {step: count for step, count in rows.items() if step < 3}
        with CompletionLog(path, most, config, done=1) as log:
            log.append(2, columns)
        assert steps() == {step: count for step, count in rows.items() if step < 3}


def sampled_line(**changes):
    row = {"prompt": ["a"], "completion": ["b"], "reward": [1.0], "advantage": [0.0], "truncated": [False]}
    return json.dumps({"step": 1, "rewards": {"mine": [1.0]}, **row, **changes}).encode() + b"\n"


def test_what_others_wrote_is_shown_without_its_commands_to_the_terminal(tmp_path, capsys):
    text = "\x1b[2J\x1b]0;title\x07\u202ered\rmine\tyours"
    (tmp_path / "completions.jsonl.gz").write_bytes(gzip.compress(sampled_line(prompt=[text], completion=[text])))
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(r"\x1b[2J\x1b]0;title\x07\u202ered\rmine" + "\tyours\n") == 2
    (tmp_path / "log.json").write_text(json.dumps([{text: 1}]))
    assert main(["diagnose", str(tmp_path / "log.json")]) == 2
    assert r"\x1b[2J" in (said := capsys.readouterr().err) and "\x1b" not in said


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"step": 1}', b"[1]", b'{"step": 1, "rewards": 1}'])
def test_a_damaged_file_of_completions_is_named(tmp_path, line):
    (tmp_path / "completions.jsonl.gz").write_bytes(gzip.compress(line + b"\n"))
    with pytest.raises(ValueError, match=r"completions.jsonl.gz is damaged"):
        read_completions(tmp_path)


def test_damaged_bytes_and_a_line_that_fills_the_memory_end_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_edu.runs.completions._LONGEST_LINE", 10_000)
    path, good = tmp_path / "completions.jsonl.gz", gzip.compress(sampled_line())
    damaged = bytearray(good)
    damaged[10] ^= 0xFF  # the first byte behind the header, which says how the rest is packed
    for rest in (damaged, gzip.compress(b" " * 10**6 + b"\n")):
        path.write_bytes(good + rest)
        assert [one.step for one in read_completions(tmp_path)] == [1]


def test_what_was_sampled_can_be_read(policy_dir, tmp_path, capsys):
    write(tmp_path / "sums.jsonl", SUMS)
    run, reward = str(tmp_path / "run"), f"{write(tmp_path / 'r.py', REWARD)}:mine"
    own = ["--data", str(tmp_path / "sums.jsonl"), "--rewards", reward, "--n", "2"]
    assert main(["train", "--model", str(policy_dir), "--output", run, *own, *SMALL]) == 0
    capsys.readouterr()
    assert main(["show", run, "--step", "2", "--worst", "2", "--best", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sampled = read_completions(run, 2)
    assert [len(found["worst"]), len(found["best"]), len(sampled)] == [2, 1, 8]
    assert found["best"][0]["reward"] == max(one.reward for one in sampled) >= found["worst"][0]["reward"]
    for one in sampled:
        assert one.rewards == {"mine": one.reward} == {"mine": len(one.completion) % 3}
    assert abs(sum(one.advantage for one in sampled[:4])) < 1e-4  # a group
    assert sampled[0].reward == pytest.approx(sampled[0].rewards["mine"])
    assert main(["show", run]) == 0
    text = capsys.readouterr().out
    assert "Step 3" in text and text.count("=== worst") == 5
    assert by_reward(read_completions(run))[0].completion in (Path(run) / "summary.md").read_text()
    for typed, words in ((["--step", "9"], "1 to 3"), (["--worst", "0"], "--worst"), ([], "keeps no completions")):
        folder = str(tmp_path) if not typed else run
        assert main(["show", folder, *typed]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "completions.jsonl.gz").write_bytes(b"not gzip")
    for typed, words in (
        ([str(tmp_path / "gone")], "gone does not exist"),
        ([str(tmp_path / "broken")], "completions.jsonl.gz is damaged"),
        ([run, "--html", f"{run}/config.json"], "--html: the name of the page must end with .html"),
    ):
        assert main(["show", *typed]) == 2
        assert words in capsys.readouterr().err
    assert json.loads((Path(run) / "config.json").read_text())["data"]  # not replaced by a page


@pytest.fixture(scope="module")
def trained(policy_dir, tmp_path_factory):
    """A run with adapters on a file of your own, with a reward from a file and a prompt of its own."""
    place = tmp_path_factory.mktemp("own")
    write(place / "sums.jsonl", SUMS)
    reward = f"{write(place / 'r.py', SECRET + REWARD)}:mine"
    own = ["--data", str(place / "sums.jsonl"), "--rewards", reward, "--system-prompt", "Be short.", "--lora-rank", "2"]
    assert main(["train", "--model", str(policy_dir), "--output", str(place / "run"), *own, *SMALL]) == 0
    return place / "run"


@pytest.mark.slow
def test_a_run_and_its_base_can_be_asked(trained, policy_dir, capsys, monkeypatch):
    asked = ["chat", str(trained), "--temperature", "0", "--json"]
    assert main([*asked, "--question", "What is 1 + 1?", "--question", "2?"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert list(first) == ["question", "base", "trained"] and second["question"] == "2?"
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 1?\n\n"))
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out) == first
    terminal = io.StringIO("too long " * 500 + "\nWhat is 1 + 1?\n")  # at a terminal an error does not end the chat
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert main(asked) == 0
    captured = capsys.readouterr()
    assert "exceed the model's context" in captured.err and json.dumps(first) in captured.out
    monkeypatch.setattr("sys.stdin", None)
    assert main(asked) == 2 and "--question" in capsys.readouterr().err
    assert main(["chat", str(policy_dir), "--question", "2?", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("answer:")


def test_the_app_asks_a_run_next_to_its_base(trained):
    from grpo_edu.dashboards import AskTheModel

    board = AskTheModel(num_generations=2, parent=trained.parent)
    board.model.value = str(trained)
    board._ask(None)
    board._ask_again(None)
    assert len(board.before) == len(board.after) == 2 and [steps for steps, _ in board.series] == [0, 3]
    assert "after 3 steps" in board.picture.value
    board.close()


def test_the_app_shows_what_a_run_sampled(trained):
    from grpo_edu.dashboards import RunComparer

    board = RunComparer(trained.parent)
    best = by_reward(read_completions(trained), best=True)[0]
    assert f"{best.reward:.2f}" in board.sampled.value and "step 3" in board.sampled.value
    board.close()


def test_an_exported_run_is_an_ordinary_transformers_folder(trained, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "mine"
    assert main(["export", str(trained), str(folder)]) == 0
    assert "The model card will show the reward `mine`" in capsys.readouterr().err
    umask = os.umask(0o022)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}
    policy, tokenizer = load_policy(trained / "model")
    model, plain = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = render_prompt(tokenizer, "Was kostet 1 + 1? 1,200 – ~")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Was kostet 1 + 1? 1,200 – ~"}]
    assert plain.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == text
    ids = plain(text, add_special_tokens=False, return_tensors="pt")
    assert ids["input_ids"].tolist() == [tokenizer(text, add_special_tokens=False)["input_ids"]]
    torch.testing.assert_close(model(**ids).logits, policy(**ids).logits)
    assert not hasattr(model, "peft_config")
    card = (folder / "README.md").read_text()
    result = json.loads((trained / "result.json").read_text())
    for words in (
        "def mine(",
        "sums.jsonl",
        "Be short.",
        "learning_rate",
        "Wilson",
        f"{result['accuracy_after']['accuracy']:.1%}",
    ):
        assert words in card
    assert str(trained.parent) not in card and "sk-secret" not in card
    assert "base_model" not in card  # a folder of this computer
    shipped = model_card(read_run_config(trained) | {"model": "tiny", "source": "tiny"}, result, tokenizer, "mine")
    assert shipped.startswith("---\nbase_model: tiny\nlicense: apache-2.0\n")
    data = {"data": str(trained.parent / "sums.jsonl"), "max_completion_length": 8}
    assert run_evaluation(folder, **data).to_dict()["k"] == result["accuracy_after"]["k"]
    capsys.readouterr()
    for source, target, words in (
        (trained, folder, "not empty"),
        (folder, tmp_path / "new", "no training run"),
        (tmp_path / "gone", tmp_path / "new", "no training run"),
        (trained, trained / "inside", "outside"),
    ):
        assert main(["export", str(source), str(target)]) == 2
        assert words in capsys.readouterr().err and not (tmp_path / "new").exists()
    before = sorted(trained.parent.rglob("*"))
    for target in (trained, trained / "model", trained.parent):  # what holds a run is never replaced
        assert main(["export", str(trained), str(target), "--overwrite"]) == 2
    assert sorted(trained.parent.rglob("*")) == before
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_bytes((trained / "config.json").read_bytes())
    (tmp_path / "damaged" / "result.json").write_text("[]")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "damaged"), str(tmp_path / "new")]) == 2
    assert "result.json is damaged; delete it" in capsys.readouterr().err


def test_a_job_for_a_cluster_carries_your_task(policy_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    write(tmp_path / "r.py", REWARD)
    write(tmp_path / "short.txt", "Be short.")
    own = ["--data", "sums.jsonl", "--rewards", "accuracy,r.py:mine", "--system-prompt", "short.txt"]
    job = ["cluster", "--output", "job", "--profile", "quick", "--nodes", "1", "--", "--model", str(policy_dir), *own]
    assert main(job) == 0
    rows = [json.loads(line) for line in (tmp_path / "job" / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and rows[0]["prompt"][0] == {"role": "system", "content": "Be short."}
    config = (tmp_path / "job" / "job.yaml").read_text()
    assert "- job_rewards.accuracy_reward\n- job_rewards.mine\n" in config
    assert {path.name for path in (tmp_path / "job" / "task").iterdir()} == {"sums.jsonl", "r.py"}
    for name in ("sums.jsonl", "r.py", "short.txt"):
        (tmp_path / name).unlink()
    job[2] = "other"
    assert main(job) == 2 and "does not exist" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("case", BAD_REWARDS)
def test_a_bad_reward_is_one_clear_sentence_and_loses_nothing(refused, tmp_path, case):
    content, name, words = BAD_REWARDS[case]
    write(tmp_path / "sums.jsonl", SUMS)
    if content is not None:
        write(tmp_path / "r.py", content)
    message = refused("--data", "sums.jsonl", "--rewards", f"r.py:{name}", "--max-completion-length", "4")
    assert all(word in message for word in words), message


def test_a_check_of_a_reward_takes_one(capsys):
    assert main(["reward-check", "accuracy,format"]) == 2
    assert "one reward, got 'accuracy,format'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["mymodule.reward", "nowhere_at_all:reward"])
def test_a_reward_that_is_no_file_says_how_to_name_one(refused, words):
    assert ".py:" in refused("--rewards", words, "--data", "basic")


CHECKED = {
    "accuracy": (
        "right, the answer alone         1.00",
        "write nothing                   0.00",
        "as much as right answers: none.",
        "your text 'it is so'",
    ),
    "r.py:overlong": ("write nothing                   0.00", "write without end               -1.00"),
    "r.py:later_stricter": ("write nothing                   1.00",),
    "r.py:part": ("give one part of the answer     1.00",),
    "r.py:last_part": ("one part of the answer     0.00", "as much as right answers: give another part of the answer."),
    "r.py:by_program": ("right, with its working         1.00", "as much as right answers: none."),
    "r.py:any_answer": ("another problem's answer        1.00", "hedge", "list every answer"),
    "r.py:always": ("0.50 to every", "nothing to learn"),
    "r.py:worked": ("0.00 to every", "no worked solutions"),
    "r.py:unanswered": ("no right one was tried", "--try"),
}


@pytest.mark.parametrize("reward", CHECKED)
def test_a_reward_is_tried_before_any_training(tmp_path, monkeypatch, capsys, reward):
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "answer": f"-{n}, {row['answer']}"} if "part" in reward else row for n, row in enumerate(SUMS)]
    if reward == "r.py:unanswered":
        rows = [{"question": row["question"], "accepted": [row["answer"]]} for row in SUMS]
    if reward == "r.py:by_program":
        rows = [{**row, "solution": f"print({row['answer']})"} for row in SUMS]
    write(tmp_path / "sums.jsonl", rows)
    overlong = "def overlong(completion_ids, **kwargs):\n    return [-float(len(c) > 40) for c in completion_ids]\n"
    stricter = "def later_stricter(completions, trainer_state, **kwargs):\n"
    stricter += "    return [float(len(c) < 200 - trainer_state.global_step) for c in completions]\n"
    part = "def part(completions, answer, **kwargs):\n"
    part += "    return [float(c[5:] != '' and c[5:] in a) for c, a in zip(completions, answer)]\n"
    last_part = "def last_part(completions, answer, **kwargs):\n"
    last_part += "    return [float(c[5:] in (a, a.split(', ')[-1])) for c, a in zip(completions, answer)]\n"
    by_program = "def by_program(completions, answer, **kwargs):\n"
    by_program += "    return [float(c == f'print({a})') for c, a in zip(completions, answer)]\n"
    any_answer = "def any_answer(completions, **kwargs):\n    return [float('####' in c) for c in completions]\n"
    always = "def always(completions, unit, **kwargs):\n    return [0.5] * len(completions)\n"
    worked = "def worked(completions, **kwargs):\n    return [float(c.count('=') > 1) for c in completions]\n"
    unanswered = "def unanswered(completions, accepted, **kwargs):\n"
    unanswered += "    return [float(c in right) for c, right in zip(completions, accepted)]\n"
    functions = any_answer + always + worked + overlong + stricter + part + last_part + by_program + unanswered
    write(tmp_path / "r.py", functions)
    assert main(["reward-check", reward, "--data", "sums.jsonl", "--try", "it is so"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in CHECKED[reward]), text


@pytest.mark.parametrize("answer", ["-3, 3", "x = -3 or x = 3", "-3; 0; 3", "-3|3"])
def test_each_alternative_of_an_answer_is_tried_alone(answer):
    first, last = ("x = -3", "x = 3") if "x" in answer else ("-3", "3")
    found = attempts(Problem("?", answer), Problem("?", "5, 7"))
    assert found["give one part of the answer"] == f"#### {first}"
    assert found["give another part of the answer"] == f"#### {last}"
    assert not any("part of" in name for name in attempts(Problem("?", "orange"), Problem("?", "5")))


def test_a_reward_is_tried_on_what_the_model_writes(policy_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    write(tmp_path / "r.py", "def length(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n")
    check = ["reward-check", "r.py:length", "--data", "sums.jsonl", "--model", str(policy_dir)]
    assert main([*check, "--samples", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["reward"] for row in found["samples"]] == [len(row["completion"]) for row in found["samples"]]
    assert len({row["prompt"] for row in found["samples"]}) == 3
    assert {"repeat the question many times", "write without end"} <= set(found["exploits"])
    assert main([*check, "--samples", "1"]) == 0
    assert capsys.readouterr().out.count("=== sample: ") == 1
    assert main(check) == 2 and "--model has no effect" in capsys.readouterr().err


def test_a_reward_finds_its_columns_in_the_held_out_file_too(tmp_path):
    write(tmp_path / "sums.jsonl", SUMS)
    write(tmp_path / "held.jsonl", [{"question": "What is 70 + 7?", "answer": "77"}])
    write(tmp_path / "r.py", "def mine(completions, unit, **kwargs):\n    return [0.0] * len(completions)\n")
    files = {"data": (str(tmp_path / "sums.jsonl"),), "heldout_file": str(tmp_path / "held.jsonl")}
    with pytest.raises(ValueError, match="mine requires the column 'unit'"):
        RunConfig(reward_funcs=(f"{tmp_path / 'r.py'}:mine",), **files).load_data()


@pytest.mark.filterwarnings("ignore:.*None for all")
def test_a_reward_that_applies_to_no_problem_is_refused_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    write(tmp_path / "r.py", "def silent(completions, **kwargs):\n    return [None] * len(completions)\n")
    assert main(["reward-check", "r.py:silent", "--data", "sums.jsonl"]) == 2
    assert "returned None for every answer" in capsys.readouterr().err


def test_the_completion_on_which_a_reward_raises_is_named():
    def mine(completions, **kwargs):
        return [1 / len(completion) for completion in completions]

    with pytest.raises(RuntimeError, match="'mine' raised ZeroDivisionError.* completion 2, ''"):
        compute_rewards(mine, prompts=["?"] * 3, completions=["a", "b", ""])


@pytest.mark.usefixtures("ctrl_c_works")
@pytest.mark.parametrize("wait", ["while True: pass", "import time; time.sleep(60)"])
def test_a_reward_that_hangs_is_named(tmp_path, monkeypatch, wait):
    monkeypatch.setattr("grpo_edu.rewards.REWARD_SECONDS", 0.2)
    mine = load_reward(f"{write(tmp_path / 'r.py', TOP + wait)}:mine")
    with pytest.raises(RuntimeError, match="'mine' did not return within 0.2 seconds"):
        compute_rewards(mine, prompts=["?"], completions=["a"])


def test_a_run_on_your_own_file_with_your_own_reward(policy_dir, tmp_path, monkeypatch, capsys):
    """The reward gets the file's columns; the run is found again from another folder, and evaluated on the same."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "sums.jsonl", SUMS)
    write(tmp_path / "r.py", REWARD)
    small = ["--steps", "2", "--prompts-per-step", "2", "--num-generations", "4", "--max-completion-length", "8"]
    own = ["--data", "sums.jsonl", "--rewards", "accuracy,r.py:mine", "--no-greedy"]
    assert main(["train", "--model", str(policy_dir), "--output", "run", *own, *small]) == 0
    assert "rewards/mine/mean" in read_log(tmp_path / "run" / "metrics.jsonl")[0]
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["data"] == [str(tmp_path / "sums.jsonl")] and stored["reward_funcs"][1] == f"{tmp_path / 'r.py'}:mine"
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy_before"]["n"] == 4
    capsys.readouterr()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["evaluate", "--model", "../run", "--data", "../sums.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 4


def test_the_mean_reward_of_a_run_is_that_of_its_folder_and_each_batch_is_paid_in_one_call(
    policy_dir, tmp_path, monkeypatch, capsys
):
    """Half of what a row is worth is paid, whatever the answer, so the mean is known."""
    rows = [{"question": f"Say {n}.", "worth": n} for n in range(10)]
    text = "def half(completions, worth, **kwargs):\n    calls.append(len(completions))\n"
    write(tmp_path / "r.py", "calls = []\n" + text + "    return [w / 2 for w in worth]\n")
    data, reward = str(write(tmp_path / "say.jsonl", rows)), f"{tmp_path / 'r.py'}:half"
    heldout = [problem.columns["worth"] for problem in load_user_problems(data, "heldout")]
    mean = 3 * sum(heldout) / len(heldout) / 2
    own = ["--data", data, "--rewards", reward, "--reward-weights", "3", "--no-greedy"]
    train = ["train", "--model", str(policy_dir), "--output", str(tmp_path / "run"), *own, *SMALL, "--json"]
    assert main(train) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy_before"]["reward"]["value"] == result["accuracy_after"]["reward"]["value"] == mean
    assert result["reward_change"] == {"difference": 0.0, "low": 0.0, "high": 0.0}
    assert result["accuracy_before"]["k"] == sum(worth / 2 >= 1 for worth in heldout), "the weight does not count"
    card = model_card(read_run_config(tmp_path / "run"), result, load_policy(tmp_path / "run" / "model")[1], "mine")
    assert f"| mean reward, sampled, temperature 1 | {mean:.3f} [" in card
    assert main(["evaluate", "--model", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("k", "n", "reward")} == {
        name: result["accuracy_after"][name] for name in ("k", "n", "reward")
    }
    assert main(["evaluate", "--model", str(tmp_path / "run"), "--data", "basic", "--n", "2"]) == 0
    assert "reward" not in capsys.readouterr().out, "other problems, so the usual accuracy"
    calls = sys.modules["grpo_edu_reward_r"].calls
    assert calls == [2], "that of the last load: one call for both problems"
    assert main(["evaluate", "--model", str(policy_dir), "--data", data]) == 2
    assert "has no column for the answer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_refuses_an_edited_reward_unless_the_run_failed_on_it(policy_dir, tmp_path, capsys):
    data, run = write(tmp_path / "sums.jsonl", SUMS), str(tmp_path / "run")
    write(tmp_path / "helper.py", "def length(text):\n    return float(len(text) % 3)\n")
    text = "from helper import length\n\ncalls = []\n\n\ndef mine(completions, **kwargs):\n    calls.append(1)\n"
    pays = "    return [length(c) for c in completions]\n"
    fails = "    if len(calls) == 3:\n        raise ValueError\n"
    interrupted = "    if len(calls) == 3:\n        import signal\n\n        signal.raise_signal(signal.SIGINT)\n"
    train = [
        "train",
        "--model",
        str(policy_dir),
        "--data",
        str(data),
        "--rewards",
        f"{tmp_path / 'r.py'}:mine",
        "--n",
        "2",
    ]
    for stop, code in ((interrupted, 2), (fails, 0)):
        write(tmp_path / "r.py", text + stop + pays)
        assert main([*train, "--output", run, "--overwrite", *SMALL]) in (1, 130)
        write(tmp_path / "r.py", text + pays)
        capsys.readouterr()
        assert main(["train", "--resume", run]) == code
        assert ("r.py was edited since the run began" in capsys.readouterr().err) == (code == 2)


def test_a_reward_file_imports_the_module_next_to_it_as_python_alone_does(tmp_path, monkeypatch):
    for folder, pays in (("installed", 0), ("mine", 1)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "paying_helper.py", f"pays = {pays}.0\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    path = list(sys.path)
    text = "from paying_helper import pays\n\ndef mine(completions, **kwargs):\n    return [pays] * len(completions)\n"
    write(tmp_path / "mine" / "r.py", text)
    function = load_reward(f"{tmp_path / 'mine' / 'r.py'}:mine")
    assert function(["x"]) == [1.0] and sys.path == [*path, str(tmp_path / "mine")]


def test_problems_without_an_answer_are_scored_by_the_reward_of_their_own_run(tmp_path):
    """Two runs in one process, with other rewards and other files, do not disturb each other."""
    questions = [{"question": f"Say {n}.", "wanted": str(n)} for n in range(10)]
    text = "def says(completions, wanted, **kwargs):\n    return [float(w in c) for c, w in zip(completions, wanted)]\n"
    text += "def never(completions, **kwargs):\n    return [0.0 for text in completions]\n"
    file, module = write(tmp_path / "say.jsonl", questions), write(tmp_path / "r.py", text)
    runs = [RunConfig(data=(str(file),), reward_funcs=("accuracy", f"{module}:{name}")) for name in ("says", "never")]
    first, second = (config.load_data() for config in runs)
    other = write(tmp_path / "other.jsonl", [{"question": f"Write {n}.", "wanted": "x"} for n in range(10)])
    RunConfig(data=(str(other),), reward_funcs=(f"{module}:never",)).load_data()
    assert len(first.problems) == 8
    problem = first.heldout[0]
    texts = [f"it is {problem.columns['wanted']}", "nothing"]
    for data, paid in ((first, [1.0, 0.0]), (second, [0.0, 0.0])):
        columns = reward_columns([data.heldout[0]] * 2)
        found = compute_rewards(data.reward_funcs, prompts=[problem.prompt] * 2, completions=texts, **columns)
        assert found[:, 0].isnan().all() and found[:, 1].tolist() == paid, "accuracy does not apply"
    model, tokenizer = load_policy("tiny")
    options = {"reward_funcs": second.reward_funcs, "max_completion_length": 4}
    assert evaluate(model, tokenizer, first.heldout, **options).rewards == [0.0, 0.0]


def test_a_float_is_an_answer_in_digits_and_nan_is_none(tmp_path):
    file = tmp_path / "floats.jsonl"
    rows = [{"question": f"{number}?", "answer": 1e-7} for number in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert {problem.answer for problem in load_user_problems(file, "train")} == {"0.0000001"}
    file.write_text("\n".join(map(json.dumps, [*rows, {"question": "6?", "answer": float("nan")}])))
    with pytest.raises(ValueError, match=r"floats\.jsonl:6: the answer \(answer\) is nan, which is no number"):
        load_user_problems(file, "train")
