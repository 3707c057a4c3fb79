"""The token inspector: the records of a step, its formulas in JavaScript against the package's, and its pages."""

import html
import json
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from test_playground import javascript

from grpo_edu.cli.main import main
from grpo_edu.config import LOSS_TYPES, GRPOConfig
from grpo_edu.dashboards.inspector import LIVE, RECORDED, RECORDED_REAL, SETTINGS, TokenInspector, recorded_tokens
from grpo_edu.fast.packing import group_logps
from grpo_edu.figures.tokens import first_mixed, token_pushes, tokens_html
from grpo_edu.losses import LOSSES
from grpo_edu.models import load_policy
from grpo_edu.problems.files import load_problems
from grpo_edu.rewards import accuracy_reward
from grpo_edu.runs.completions import recorded_steps
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.run import run_training
from grpo_edu.runs.tokens import TokenRecorder, join_parts, kept_steps, read_tokens, token_text
from grpo_edu.trainer import Stages, train

CONFIG = GRPOConfig(
    prompts_per_step=4,
    num_generations=4,
    max_steps=2,
    max_completion_length=48,
    num_iterations=3,
    beta=0.05,
    learning_rate=1e-3,
    seed=2,
)


@pytest.fixture(scope="module")
def recorded():
    """A record of the second step of a small run, and what a careful observer saw of that step."""
    model, tokenizer = load_policy("tiny")
    problems = load_problems(("basic", "intermediate"), "train", n=12)
    seen = []

    def watched(update, parts):
        """Looks at the policy with the trainer's own functions, around the recorder."""
        model, state = update.training.model, update.training.state
        rollout = update.batch.rollout
        arguments = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
        score = lambda policy: group_logps(policy, *arguments, num_generations=4).detach().clone()  # noqa: E731
        before = score(model)
        found = recorder.step(update, parts)
        seen.append((update.batch, before, score(model), score(state.reference)))
        return found

    recorder = TokenRecorder(model, tokenizer, CONFIG, ["last"])
    list(train(model, tokenizer, problems, accuracy_reward, CONFIG, stages=Stages(optimizer_step=watched)))
    return recorder.record, seen[3:]


@pytest.mark.slow
def test_the_record_is_what_the_trainer_sees(recorded):
    record, seen = recorded
    assert record["step"] == 2 and len(seen) == 3 and len(record["groups"]) == 4
    batch = seen[0][0]
    lengths = batch.rollout.completion_mask.sum(dim=1).tolist()
    assert record["num_tokens"] == sum(lengths) and record["rewards"] == batch.rewards.tolist()
    for row, length in enumerate(lengths):
        one = record["groups"][row // 4]["completions"][row % 4]
        assert len(one["tokens"]) == length
        assert one["sampling"] == pytest.approx(batch.rollout.sampling_per_token_logps[row, :length].tolist(), abs=1e-5)
        assert one["ref"] == pytest.approx(seen[0][3][row, :length].tolist(), abs=1e-4)
        for update, (_, before, after, _) in enumerate(seen):
            assert one["logps"][update] == pytest.approx(before[row, :length].tolist(), abs=1e-4)
            assert one["logps"][update + 1] == pytest.approx(after[row, :length].tolist(), abs=1e-4)
        for token, kinds, logp in zip(one["tokens"], one["alternatives"], one["logps"][0], strict=True):
            chances = [before for _, before, _ in kinds]
            assert chances == sorted(chances, reverse=True) and sum(chances) <= 1.00001
            found = {text: before for text, before, _ in kinds}.get(token)
            assert found is None or found == pytest.approx(torch.tensor(logp).exp().item(), abs=1e-5)


@pytest.mark.slow
def test_recording_changes_nothing_of_the_training():
    problems = load_problems("basic", "train", n=8)
    config = GRPOConfig(prompts_per_step=2, num_generations=4, max_steps=2, max_completion_length=24)
    ended = []
    for records in (False, True):
        model, tokenizer = load_policy("tiny")
        stages = TokenRecorder(model, tokenizer, config).stages if records else None
        history = list(train(model, tokenizer, problems, accuracy_reward, config, stages=stages))
        ended.append(([row["loss"] for row in history], [weight.clone() for weight in model.parameters()]))
    assert ended[0][0] == ended[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ended[0][1], ended[1][1], strict=True))


TERMS = """given => given.asked.map(({ group, settings }) =>
  groupTerms(given.record, given.record.groups[group], settings).map(row => row.map(one => [one.loss, one.push])))"""


def settings_of(record):
    """Every loss at both levels in each update, with every scaling in turn, and bounds and KL of its own."""
    draws, scalings = torch.Generator().manual_seed(0), cycle(("group", "batch", "none", "mean", "rloo", "recorded"))
    for loss, level in product(LOSS_TYPES, ("token", "sequence")):
        for update in range(len(record["groups"][0]["completions"][0]["logps"]) - 1):
            low, high, beta = (torch.rand(3, generator=draws) * torch.tensor([0.2, 0.3, 0.2])).tolist()
            high = 1 + high if LOSSES[loss].clips == "weight" else high
            bounds = {"low": low, "high": high, "beta": beta}
            yield {"loss": loss, "scaling": next(scalings), "level": level, "update": update, **bounds}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["live", "quantized", RECORDED_REAL])
def test_the_page_computes_what_the_package_computes(recorded, kind, node):
    record = recorded_tokens(kind) if kind == RECORDED_REAL else json.loads(json.dumps(recorded[0]))
    if kind == "quantized":  # weights of another policy that sampled, a token that does not count, a missing reward
        for group in record["groups"]:
            for one in group["completions"]:
                one["importance"] = [0.5 + 0.1 * (place % 7) for place in range(len(one["tokens"]))]
        first = record["groups"][0]["completions"][0]
        first["counts"] = [0, *[1] * (len(first["tokens"]) - 1)]
        record["num_tokens"] -= 1
        record["groups"][1]["completions"][2]["reward"] = record["rewards"][6] = None
    asked = [
        {"group": group, "settings": settings}
        for settings in settings_of(record)
        for group in range(len(record["groups"]))
    ]
    found = javascript(TERMS, {"record": record, "asked": asked})
    pushed = 0
    for one, rows in zip(asked, found, strict=True):
        losses, pushes = token_pushes(record, one["group"], **one["settings"])
        for row, values in enumerate(rows):
            counts = record["groups"][one["group"]]["completions"][row].get("counts", [1] * len(values))
            for place, (loss, push) in enumerate(values):
                assert push == pytest.approx(pushes[row, place].item(), abs=1e-9), (one, row, place)
                if counts[place]:
                    assert loss == pytest.approx(losses[row, place].item(), abs=1e-9), (one, row, place)
                pushed += abs(push) > 1e-9
    assert pushed > 1000


def test_clipped_tokens_are_those_of_the_package(recorded, node):
    record, _ = recorded
    group = max(range(4), key=lambda number: len({one["reward"] for one in record["groups"][number]["completions"]}))
    settings = record["settings"] | {"low": 0.02, "high": 0.02, "beta": 0.0, "update": 2}
    code = "g => groupTerms(g.record, g.record.groups[g.group], g.settings).map(row => row.map(one => one.clipped))"
    found = javascript(code, {"record": record, "group": group, "settings": settings})
    _, pushes = token_pushes(record, group, **settings)
    expected = [[pushes[row, place].item() == 0 for place in range(len(values))] for row, values in enumerate(found)]
    assert found == expected and any(map(any, found)) and not all(map(all, found))


def test_the_inspector_brings_a_step_of_each_model():
    board = TokenInspector()
    for source, model in ((RECORDED, "tiny"), (RECORDED_REAL, "SmolLM2")):
        board.source.value = source
        record = recorded_tokens(source)
        assert board.record == record and model in board.message.value
        assert record["groups"][0]["completions"][0]["tokens"][0] in html.unescape(board.picture.value)
    board.source.value = LIVE
    assert "Train a step" in board.message.value


def test_a_live_step_says_what_is_under_way_and_can_be_stopped(monkeypatch):
    small = {"prompts_per_step": 2, "num_generations": 2, "num_iterations": 2, "max_completion_length": 8}
    monkeypatch.setattr("grpo_edu.dashboards.inspector.SETTINGS", replace(SETTINGS, **small))
    board = TokenInspector()
    seen = []
    board.message.observe(lambda change: seen.append(change["new"]), "value")
    board.train.click()
    board.worker.join()
    parts = (
        "Loading tiny",
        "Sampling 2 answers to each of 2",
        "update 1 of 2",
        "update 2 of 2",
        "Step 1 of the live run",
    )
    at = [next(number for number, text in enumerate(seen) if part in text) for part in parts]
    assert at == sorted(at) and "<progress" in seen[at[2]] and "<progress" not in seen[-1]
    assert board.record["step"] == 1 and board.train.button_style == "primary"
    with monkeypatch.context() as told:
        told.setattr(board, "_tell", lambda line, part: board.halt())
        board.train.click()
        board.worker.join()
    assert "Stopped" in board.message.value and board.train.button_style == "primary" and board.record["step"] == 1
    board.train.click()
    board.worker.join()
    assert "Step 1 of the live run" in board.message.value, "a new run begins after a stop"


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


def texts(ids):
    return join_parts(Bytes(), ids, [token_text(Bytes(), token) for token in ids])


def test_tokens_of_one_character_show_it_once():
    assert texts("é🙂!".encode()) == ["⋯", "é", "⋯", "⋯", "⋯", "🙂", "!"]
    assert texts("a🙂".encode()[:3]) == ["a", "⋯", "⋯"], "cut within a character"


def test_steps_that_are_asked_for():
    assert recorded_steps(["first", "3", "last"], 9) == {1, 3, 9} and recorded_steps(["all"], 2) == {1, 2}
    for wrong in ("0", "10", "two", "-1"):
        with pytest.raises(ValueError, match=rf"`record_token_steps`: '{wrong}'.*1 to 9"):
            recorded_steps([wrong], 9)
    with pytest.raises(ValueError, match="record_token_steps.*TRL"):
        RunConfig(backend="trl", record_token_steps="1")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = GRPOConfig(prompts_per_step=2, num_generations=4, max_steps=3, max_completion_length=24)
    output = tmp_path_factory.mktemp("runs") / "inspected"
    options = dict(data="basic", n=4, inspect_steps="first,3")
    run_training(config=config, output=output, progress=False, **options)
    return output


@pytest.mark.slow
def test_a_run_keeps_the_steps_and_the_command_writes_a_page(run, tmp_path, capsys):
    assert kept_steps(run) == [1, 3] and read_tokens(run)["step"] == 3
    page = tmp_path / "page.html"
    assert main(["show", str(run), "--step", "1", "--html", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    assert "http" not in text.replace("http-equiv", "") and "data-tokens" in text
    assert "<script>" in text and tokens_html(read_tokens(run, 1), first_mixed(read_tokens(run, 1)))[:200] in text
    assert main(["show", str(run), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("data-tokens=") == 2 and "Step 1<" in text and "Step 3<" in text, "all steps that were kept"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--step", "2", "--html", "page.html"], ["--step", "step 2", "1, 3", "--inspect-steps 2"]),
        (["--html", "no/such/page.html"], ["no/such/page.html", "No such file"]),
        (["--html", "page.html", "--best", "2"], ["--best", "--html"]),
    ],
)
def test_what_the_command_refuses(run, typed, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["show", str(run), *typed]) == 2
    error = capsys.readouterr().err
    assert all(part in error for part in said) and not list(tmp_path.iterdir()), error


def test_a_run_without_records_says_what_to_do(tmp_path, capsys):
    assert main(["show", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert "token records" in error and "--inspect-steps" in error
