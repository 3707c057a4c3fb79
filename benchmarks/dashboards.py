"""What the dashboards cost: ``python -m benchmarks.dashboards``.

Pictures per second of processor time of each explorer while a control is moved; pictures per second of the live curves
and the share of a training run's time that they take, by the dashboard's own watch and next to the same run without, in
turn; memory and threads over 200 times Start and Stop; first paint of the app, from key to picture, and the way to the
first visible learning of notebook 00 in a browser; kB per page of the web book in ``build/book``. 10 minutes. Writes
``benchmarks/results/dashboards.json``; exits with 1 if a promise is not kept. ``--parts recordings`` writes what two
dashboards show until they are used, ``data/curves/dashboard_run.json`` and ``ask_the_model.json``; ``--parts smollm2``
the same of a real model, ``ask_smollm2.json``; ``--parts exploits`` writes ``exploits.json``, which the web book shows;
``--parts tokens`` writes ``tokens.json``, a step for the token inspector. ``--parts smollm2_run`` trains SmolLM2 as
notebook 14 does, and writes the run step by step, ``smollm2_run.json``, and the tokens of one of its steps,
``tokens_smollm2.json``; this takes two to five minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ipywidgets import Widget

from benchmarks.browser import measure_book, measure_browser
from benchmarks.harness import RESULTS, exit_code, markdown, save, spread
from benchmarks.real_model import FOLDER as REAL_RUNS
from benchmarks.step import Stopwatch
from grpo_edu import GRPOConfig, generate, load_policy, load_problems, render_prompt
from grpo_edu.batch import Batch
from grpo_edu.dashboards import (
    AdvantageExplorer,
    AskTheModel,
    ForgettingDashboard,
    ObjectiveExplorer,
    QuantizationExplorer,
    RewardLab,
    TokenInspector,
    TrainingDashboard,
)
from grpo_edu.dashboards.ask import read_answer
from grpo_edu.dashboards.base import Dashboard
from grpo_edu.dashboards.inspector import KINDS
from grpo_edu.fast.memory import resident_bytes, return_large_blocks
from grpo_edu.figures.live import ACCURACY
from grpo_edu.problems.instructions import INSTRUCTION_REWARDS, check_instruction, constraint_reward
from grpo_edu.problems.templates import Problem, data_dir, prompt_options
from grpo_edu.rewards import REWARDS
from grpo_edu.runs.tokens import TokenRecorder, score_tokens
from grpo_edu.studies.exploits import judge_reward
from grpo_edu.trainer import start_training, train

COMMAND = "python -m benchmarks.dashboards"
PARTS = ("updates", "overhead", "cycles", "browser", "book")
BOOK, LARGEST_PAGE = RESULTS.parents[1] / "build" / "book", 300  # kB, without pictures
RECORDINGS, EXPLOITED, TOKENS = "recordings", "exploits", "tokens"
SMOLLM2, SMOLLM2_RUN = "smollm2", "smollm2_run"
# The run of notebook 14: eight steps on three kinds of instructions, paid for obeying and for nothing else.
NOTEBOOK_14 = GRPOConfig(
    prompts_per_step=6,
    num_generations=8,
    max_completion_length=32,
    max_steps=8,
    learning_rate=2e-5,
    gradient_accumulation_steps=6,
    loss_type="dr_grpo",
    scale_rewards="none",
)
ASKED, ANSWERS = 3, 4  # held-out instructions, one of each kind, and answers to each after every step
STUDY_RUN = "instructions-strict-2e-05-2-40"  # of SmolLM2
RECORDED_STEP, RECORDED_GROUPS = 3, 2  # of the token inspector
UPDATES, CYCLES, SETTLED = 40, 200, 20  # pictures of each explorer; Start and Stop; those before memory is compared
LATEST_PAINT, LATEST_LEARNING = 2, 60  # seconds, on two quiet cores
LEAST_A_SECOND, MOST_OVERHEAD, MOST_GROWTH = 4, 0.10, 0.05  # a quarter of a second after a click feels immediate
CURVES = ("step", "reward", "completions/mean_length", "frac_reward_zero_std", "entropy", ACCURACY)  # of a recorded run
ON_TOPIC = "on topic"  # share of a step's answers
LONGEST_GAP = 0.7  # seconds of training between two pictures of the live curves, where a step is shorter


def _moved() -> dict[str, tuple[Dashboard, Widget]]:
    """Explorer → (dashboard, the control of it that is moved)."""
    boards = [AdvantageExplorer(), ObjectiveExplorer(), RewardLab(), QuantizationExplorer(), ForgettingDashboard()]
    advantages, objective, lab, quantization, forgetting = boards
    controls = [advantages.success, objective.ratio, lab.weights["steps"], quantization.bits, forgetting.method]
    return {type(board).__name__: (board, control) for board, control in zip(boards, controls, strict=True)}


def measure_updates() -> dict[str, dict[str, float]]:
    """Pictures per second of processor time: a control is set, and the picture is there when the assignment returns."""
    rates = {}
    for name, (board, control) in _moved().items():
        values = _values(control)
        seconds = []
        for number in range(UPDATES + 4):
            before = board.picture.value
            started = time.process_time()
            control.value = values[(number + 1) % len(values)]
            seconds.append(time.process_time() - started)
            if board.picture.value == before:
                raise RuntimeError(f"{name}: the picture did not follow its control")
        rates[name] = spread([1 / value for value in seconds[4:]])
    return rates


def _values(control: Any) -> list:
    """Four values of a control between which it is moved."""
    if hasattr(control, "options"):
        return [pair[1] if isinstance(pair, tuple) else pair for pair in control.options]
    low, high = control.min, control.max
    values = [low + (high - low) * share for share in (0.2, 0.4, 0.6, 0.8)]
    return [type(control.value)(value) for value in values]


def _board(*, steps: int, **settings: int) -> TrainingDashboard:
    board = TrainingDashboard()
    board.steps.value, board.heldout.value, board.every.value = steps, 20, 0
    for name, value in settings.items():
        getattr(board, name).value = value
    return board


def _train(board: TrainingDashboard) -> float:
    """Start a run, wait for its end; return the seconds of its steps."""
    _train_default(board)
    return board.run.training_seconds


def measure_overhead(rounds: int, steps: int = 30) -> dict[str, Any]:
    """Live curves against none, in turn: seconds of a training in the same thread with and without pictures."""
    live, dark, watch = _board(steps=steps), _board(steps=steps), Stopwatch()
    live._draw, dark._draw = watch.timed("pictures", live._draw), lambda: None
    _train(live), _train(dark)  # models are loaded, libraries warm
    pairs, shares, rates, kept = [], [], [], []
    for _ in range(rounds):
        watch.seconds.clear()
        watch.counts.clear()
        training, without = _train(live), _train(dark)
        drawing, count = watch.seconds["pictures"], watch.counts["pictures"]
        pairs.append((training + drawing) / without - 1)
        shares.append(drawing / training)
        rates.append(count / training)
        kept.append(count / min(steps, training / LONGEST_GAP))
    return {
        "share of the training's time": spread(shares),
        "slower than without": spread(pairs),
        "pictures per second": spread(rates),
        "pictures, of one per step or 0.7 s": spread(kept),
    }


def measure_cycles(cycles: int = CYCLES) -> dict[str, Any]:
    """Start, the first step, Stop, so many times; memory and threads after the first twenty and at the end.

    Two kinds of memory: what the program uses, which would grow with a leak, and what the process has from the system.
    The second also holds freed blocks that the C library keeps for later.
    """
    board = _board(steps=200, generations=2, prompts=1, length=16)
    held, used, threads, answers = [], [], [], []
    for _ in range(cycles):
        board.start.click()
        _until(lambda: bool(board.run.history) or not board.worker.running)
        started = time.perf_counter()
        board.stop.click()
        board.worker.join()
        answers.append(time.perf_counter() - started)
        if "Stopped" not in board.message.value:
            raise RuntimeError(board.message.value)
        return_large_blocks()
        held.append(resident_bytes())
        used.append(_bytes_in_use())
        threads.append(threading.active_count())
    moments = [SETTLED, cycles // 2, cycles]
    return {
        "cycles": cycles,
        "seconds to stop": spread(answers),
        "at": moments,
        "MB in use": [round(used[at - 1] / 1e6, 1) for at in moments],
        "MB of the process": [round(held[at - 1] / 1e6, 1) for at in moments],
        "threads": [threads[at - 1] for at in moments],
    }


def _bytes_in_use() -> int:
    """Return how many bytes glibc's malloc has given to the program and not got back."""
    kinds = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    counts = type("mallinfo2", (ctypes.Structure,), {"_fields_": [(kind, ctypes.c_size_t) for kind in kinds]})
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = counts
    found = library.mallinfo2()
    return found.uordblks + found.hblkhd


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.005)


def record_runs() -> None:
    """Train with the default settings of two dashboards, and store what they show at the end."""
    board = TrainingDashboard()
    _train_default(board)
    rows = [{key: round(row[key], 4) for key in CURVES if key in row} for row in board.run.rows()]
    _store("dashboard_run.json", {"alt": board.alt, "verdict": board.run.verdict(), "history": rows})
    ask = AskTheModel()
    ask._draws = 0  # the first answers of a reader are others
    for button in (ask.train, ask.again):
        button.click()
        ask.worker.join()
    if not ask.after:
        raise RuntimeError(ask.message.value)
    for row in (*ask.before, *ask.after):
        row |= {key: float(f"{row[key]:.4g}") for key in ("advantage", "chance", "start", "then") if key in row}
    shown = {"before": ask.before, "after": ask.after, "series": ask.series}
    _store("ask_the_model.json", {"question": ask.question.value, **shown})


def record_smollm2() -> None:
    """Ask SmolLM2 for two instructions before and after a run of `benchmarks.real_model`, and store its answers."""
    run = REAL_RUNS / STUDY_RUN
    if not (run / "model").is_dir():
        raise SystemExit(f"{run} is missing; python -m benchmarks.real_model makes it")
    ask, asked = AskTheModel(model="smollm2", parent=REAL_RUNS), []
    ask.model.value = str(run)
    first = [value for _, value in ask.choose.options].index(ask.choose.value)
    for _, question in ask.choose.options[first : first + 2]:
        ask.choose.value = question
        for button in (ask.ask, ask.again):
            button.click()
            ask.worker.join()
        if not ask.after:
            raise RuntimeError(ask.message.value)
        looks = []
        for steps, rows, key in ((0, ask.before, "chance"), (ask.trained, ask.after, "then")):
            chances = [float(f"{row[key]:.4g}") for row in ask.before]  # of the first answers
            looks.append({"steps": steps, "rows": rows, "chances": chances})
        for look in looks:
            for row in look["rows"]:
                row |= {key: float(f"{row[key]:.4g}") for key in ("advantage", "chance")}
                for key in ("start", "then"):
                    row.pop(key, None)
        asked.append({"question": question, "looks": looks})
        _store("ask_smollm2.json", {"run": STUDY_RUN, "asked": asked}, SMOLLM2)


def record_exploits() -> None:
    """Record, for the reward lab of the web book, what each reward pays for cheating and for honest work."""
    _store("exploits.json", paid_to_exploits(), EXPLOITED)


def paid_to_exploits() -> dict[str, Any]:
    """Names of the rewards, and for each exploit its texts and what every reward pays for it and for honest work."""
    functions = {name: reward for name, reward in REWARDS.items() if name not in INSTRUCTION_REWARDS}
    judged = [judge_reward(function) for function in functions.values()]
    rows = []
    for verdicts in zip(*judged, strict=True):
        exploit = verdicts[0].exploit
        rows.append(
            {
                "name": exploit.name,
                "question": exploit.problem.prompt,
                "solution": exploit.problem.solution,
                "text": exploit.completion,
                "paid": [verdict.paid_to_exploit for verdict in verdicts],
                "honest": [verdict.paid_to_honest for verdict in verdicts],
            }
        )
    return {"rewards": list(functions), "rows": rows}


def _train_default(board: TrainingDashboard) -> None:
    board.start.click()
    board.worker.join()
    if board.run.after is None:
        raise RuntimeError(board.message.value)


def without_groups(record: dict[str, Any], kept: int) -> dict[str, Any]:
    """Return the record with only its first groups of different rewards, at most `kept`, to keep a page small."""
    mixed = [group for group in record["groups"] if len({one["reward"] for one in group["completions"]}) > 1]
    return {**record, "groups": mixed[:kept]}


def record_tokens() -> None:
    """Train three steps with the settings of the token inspector, and store two groups of the last one."""
    board = TokenInspector()
    for _ in range(RECORDED_STEP):
        board.train.click()
        board.worker.join()
    if board.record is None or board.record["step"] != RECORDED_STEP:
        raise RuntimeError(board.message.value)
    _store("tokens.json", {"record": without_groups(board.record, RECORDED_GROUPS)}, TOKENS)


def record_smollm2_run() -> None:
    """Train SmolLM2 as notebook 14 does; store the samples of each step, held-out answers, and one step's tokens."""
    model, tokenizer = load_policy(SMOLLM2)
    to_train = [one for one in load_problems("instructions", "train") if one.level in KINDS]
    asked = [one for one in load_problems("instructions", "heldout") if one.level in KINDS][:ASKED]
    recorder = TokenRecorder(model, tokenizer, NOTEBOOK_14, [RECORDED_STEP])
    state = start_training(model, tokenizer, to_train, NOTEBOOK_14)
    generator, looks, first = torch.Generator().manual_seed(1), [[] for _ in asked], []  # with 0 an answer swears

    def look(steps: int) -> None:
        """Ask the held-out questions, and score the first answers to them again."""
        for number, problem in enumerate(asked):
            prompt = render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level))
            rollout = generate(
                model,
                tokenizer,
                [prompt],
                num_generations=ANSWERS,
                max_completion_length=NOTEBOOK_14.max_completion_length,
                generator=generator,
            )
            first.extend([rollout] if not steps else [])
            rows = _answers(
                problem, rollout.completions, constraint_reward(rollout.completions, [problem.answer] * ANSWERS)
            )
            mask = first[number].completion_mask
            mean_logps = score_tokens(model, first[number], temperature=1.0).logps.sum(dim=1) / mask.sum(dim=1)
            per_token = [float(f"{chance:.4g}") for chance in mean_logps.exp().tolist()]
            looks[number].append({"steps": steps, "rows": rows, "per_token": per_token})

    look(0)
    history = []
    for metrics in train(
        model, tokenizer, to_train, constraint_reward, NOTEBOOK_14, state=state, stages=recorder.stages
    ):
        row = {key: round(metrics[key], 4) for key in CURVES if key in metrics}
        history.append(row | _of_batch(state.batch, {one.prompt: one for one in to_train}))
        look(int(metrics["step"]))
        print(json.dumps(row), flush=True)
    begin, end = history[0], history[-1]
    verdict = (
        f"From the first step to the last the mean reward went from {begin['reward']:.2f} to {end['reward']:.2f}. The "
        "share of answers on the topic, for which nothing was paid, went from "
        f"{begin[ON_TOPIC]:.0%} to {end[ON_TOPIC]:.0%}."
    )
    questions = [{"question": one.prompt, "looks": found} for one, found in zip(asked, looks, strict=True)]
    content = {"title": "SmolLM2 learns to obey", "verdict": verdict, "history": history, "asked": questions}
    _store("smollm2_run.json", content, SMOLLM2_RUN)
    _store("tokens_smollm2.json", {"record": without_groups(recorder.record, 1)}, SMOLLM2_RUN)


def _of_batch(batch: Batch, problems: dict[str, Problem]) -> dict[str, Any]:
    """Return a step's first group with different rewards, or its first, and the share of all answers on the topic."""
    rollout, size = batch.rollout, NOTEBOOK_14.num_generations
    groups = batch.rewards.view(-1, size)
    chosen = int((groups.std(dim=1) > 0).int().argmax())
    owners = [next(one for text, one in problems.items() if text in prompt) for prompt in rollout.prompts]
    on_topic = [
        check_instruction(text, one.answer).on_topic for text, one in zip(rollout.completions, owners, strict=True)
    ]
    rows = slice(chosen * size, (chosen + 1) * size)
    problem = owners[rows.start]
    found = _answers(problem, rollout.completions[rows], batch.rewards[rows].tolist())
    for row, advantage in zip(found, batch.advantages[rows].tolist(), strict=True):
        row["advantage"] = round(advantage, 4)
    return {ON_TOPIC: round(sum(on_topic) / len(on_topic), 4), "question": problem.prompt, "rows": found}


def _answers(problem: Problem, texts: list[str], rewards: list) -> list[dict[str, Any]]:
    """Answers with what they miss and their reward."""
    return [
        {"text": text, "answer": read_answer(problem, text), "reward": reward}
        for text, reward in zip(texts, rewards, strict=True)
    ]


def _store(name: str, content: dict[str, Any], part: str = RECORDINGS) -> None:
    path = data_dir() / "curves" / name
    path.write_text(json.dumps({"command": f"{COMMAND} --parts {part}", **content}) + "\n", encoding="utf-8")


RECORDERS = {
    RECORDINGS: record_runs,
    EXPLOITED: record_exploits,
    TOKENS: record_tokens,
    SMOLLM2: record_smollm2,
    SMOLLM2_RUN: record_smollm2_run,
}


def verdicts(record: dict[str, Any]) -> dict[str, bool]:
    """Return whether each promise is kept, judged by what was measured."""
    found = {}
    if "updates" in record:
        slowest = min(rate["median"] for rate in record["updates"].values())
        found[f"every explorer draws at least {LEAST_A_SECOND} pictures a second"] = slowest >= LEAST_A_SECOND
    if "overhead" in record:
        share = record["overhead"]["share of the training's time"]["high"]
        found[f"live curves take less than {MOST_OVERHEAD:.0%} of the training's time"] = share < MOST_OVERHEAD
        drawn = record["overhead"]["pictures, of one per step or 0.7 s"]["low"]
        found[f"live curves are drawn after each step, or at least once per {LONGEST_GAP} s"] = drawn >= 1
    if "cycles" in record:
        cycles = record["cycles"]
        kept = [cycles[name][-1] <= (1 + MOST_GROWTH) * cycles[name][0] for name in ("MB in use", "MB of the process")]
        same = all(kept) and cycles["threads"][0] == cycles["threads"][-1]
        found[f"after {cycles['cycles']} times Start and Stop memory and threads are back within 5%"] = same
        found["Stop answers within a second"] = cycles["seconds to stop"]["high"] < 1
    if "browser" in record:
        paint = record["browser"]["first paint, s"]["high"]
        found[f"the app's first paint is within {LATEST_PAINT} s"] = paint < LATEST_PAINT
        learned = record["browser"]["notebook 00"]["accuracy before and after, s"]["high"]
        found[f"notebook 00 shows what was learned within {LATEST_LEARNING} s of opening it"] = (
            learned < LATEST_LEARNING
        )
    if "book" in record:
        largest = record["book"]["kB of a page"]["high"]
        found[f"no page of the book has more than {LARGEST_PAGE} kB without its pictures"] = largest <= LARGEST_PAGE
    return found


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=(*PARTS, *RECORDERS), default=list(PARTS), help="others keep what is stored"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pictures", type=Path, help="a folder for what the browser showed")
    parser.add_argument("--output", type=Path, default=RESULTS / "dashboards.json")
    options = parser.parse_args()
    for part, record_part in RECORDERS.items():
        if part in options.parts:
            record_part()
            options.parts.remove(part)
    if not options.parts:
        return 0
    record = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    measures = {
        "updates": measure_updates,
        "overhead": lambda: measure_overhead(options.rounds),
        "cycles": measure_cycles,
        "browser": lambda: measure_browser(options.pictures),
        "book": lambda: measure_book(BOOK),
    }
    for part in options.parts:
        record[part] = measures[part]()
        kept = {name: record[name] for name in PARTS if name in record}
        save(options.output, COMMAND, {"verdicts": verdicts(kept), **kept})
    if "updates" in record:
        print(
            markdown(
                [
                    {
                        "explorer": name,
                        "pictures a second": f"{rate['median']:.0f} ({rate['low']:.0f} … {rate['high']:.0f})",
                    }
                    for name, rate in record["updates"].items()
                ]
            )
        )
    for part in ("overhead", "cycles", "browser", "book"):
        print(part, json.dumps(record.get(part)))
    kept = verdicts({name: record[name] for name in PARTS if name in record})
    return exit_code(kept)


if __name__ == "__main__":
    sys.exit(main())
