"""GRPO on GSM8K with half a billion parameters: ``python -m benchmarks.gsm8k``.

The run is the profile gsm8k-0.5b: LoRA on Qwen2.5-Coder-0.5B-Instruct. The rule for prompt and temperature was written
before anything was measured: of each setting in `SETTINGS`, 24 training problems that no run trains on get 8 samples
each of at most 256 tokens. Settings that cut off more than a quarter of them are out. Of the others, the one with the
most groups whose accuracy rewards differ is taken, because only these teach something; of equals, the one with fewer
tokens. The learning rate was not selected.

Each arm starts from the same model and differs in one thing. "accuracy" rewards a right final answer, "form" the
form of the last line alone, "shuffled" pays the accuracy rewards of a step in a random order, and "supervised"
learns GSM8K's own solutions with as many tokens as "accuracy" processed. All are judged on the first 300 problems of
the test set, greedily and sampled at temperature 1, by three readings of each completion: strict (`extract_answer`, a
final answer), lenient (the last number anywhere), and readable (is there a final answer?). After the result, the
models in `LONGER_ROWS` were also asked with `LONGER` tokens, greedily, because 256 cut off many answers of the
untrained model without examples.

Each result is one line of ``benchmarks/results/gsm8k.jsonl``; ``gsm8k.json`` holds the summary. Runs keep checkpoints
in ``runs/gsm8k``, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch

from benchmarks.extraction import last_number, same_number
from benchmarks.harness import (
    GSM8K,
    RESULTS,
    Ledger,
    bits,
    counted,
    finetune_for,
    finish_run,
    ledger_options,
    ones,
    save,
    share,
    shuffled,
)
from grpo_edu import accuracy_reward, evaluate, format_reward, generate, load_policy, render_prompt
from grpo_edu.config import SupervisedConfig
from grpo_edu.evaluation import mcnemar, paired_bootstrap
from grpo_edu.fast.lora import add_lora, load_adapters
from grpo_edu.machine.hardware import cpu_report
from grpo_edu.model_files import choose_device
from grpo_edu.problems.equations import check_equations
from grpo_edu.problems.files import load_gsm8k
from grpo_edu.problems.templates import Problem, prompt_options
from grpo_edu.prompts import PromptStyle, extract_answer, set_prompt_style
from grpo_edu.runs.options import RunConfig
from grpo_edu.runs.profiles import load_profile

COMMAND = "python -m benchmarks.gsm8k"
LEDGER = RESULTS / "gsm8k.jsonl"
FOLDER = RESULTS.parents[1] / "runs" / "gsm8k"
PROFILE = load_profile("gsm8k-0.5b").request()
LENGTH = PROFILE.config.max_completion_length
NUM_TEST, NUM_SELECTION, NUM_EXAMPLES = 300, 24, 3
# Number of solved examples in the prompt, and temperature.
SETTINGS = ((0, 1.0), (0, 0.6), (NUM_EXAMPLES, 1.0), (NUM_EXAMPLES, 0.6))
ARMS = ("accuracy", "form", "shuffled", "supervised")
SUPERVISED_RATE = 1e-4
LONGER = 512  # tokens
# The untrained model or an arm, and the number of examples in its prompt.
LONGER_ROWS = (("untrained", 0), ("untrained", NUM_EXAMPLES), ("accuracy", NUM_EXAMPLES), ("accuracy", 0))
WAYS = {"greedy": 0.0, "sampled": 1.0}  # the temperature at which the test problems are answered
READINGS = [f"{way}/{reading}" for way in WAYS for reading in ("strict", "lenient", "readable")]
DEVICE = choose_device()
DTYPE = "bfloat16" if DEVICE.type == "cuda" or cpu_report()["fast_bf16"] else "float32"
MACHINE = f"{DEVICE.type}, {DTYPE}"


class Study:
    """The model, the data and the results of the study."""

    def __init__(self, model: str, data: str, ledger: Ledger) -> None:
        self.model, self.data, self.ledger = model, data, ledger
        self.tests = load_gsm8k("test", data, n=NUM_TEST)
        problems = load_gsm8k("train", data)
        self.examples = problems[:NUM_EXAMPLES]
        self.selection = problems[-NUM_SELECTION:]
        self.num_problems = len(problems) - NUM_SELECTION

    def open_model(self, num_examples: int) -> tuple[Any, Any]:
        """Return the untrained model and its tokenizer, with so many solved examples in its prompts."""
        model, tokenizer = load_policy(self.model, DTYPE)
        shown = tuple((one.prompt, one.solution) for one in self.examples[:num_examples])
        set_prompt_style(tokenizer, PromptStyle(examples=shown))
        return model.to(DEVICE), tokenizer

    # ---- selection of the prompt and the temperature ----

    def measure_setting(self, num_examples: int, temperature: float) -> None:
        """Sample the selection problems with one setting, and store what the rule needs."""
        key = {"phase": "select", "num_examples": num_examples, "temperature": temperature}
        if not self.ledger.wants(**key):
            return
        model, tokenizer = self.open_model(num_examples)
        size, started = PROFILE.config.num_generations, time.perf_counter()
        rewards, tokens, cut = [], 0, 0
        for start in range(0, NUM_SELECTION, 8):
            part = self.selection[start : start + 8]
            rollout = generate(
                model,
                tokenizer,
                [render_prompt(tokenizer, one.prompt, **prompt_options(one.level)) for one in part],
                num_generations=size,
                max_completion_length=LENGTH,
                temperature=temperature,
                generator=torch.Generator().manual_seed(start),
            )
            answers = [one.answer for one in part for _ in range(size)]
            rewards += accuracy_reward(rollout.completions, answer=answers)
            tokens += int(rollout.completion_mask.sum())
            cut += int(rollout.is_truncated.sum())
        seconds = time.perf_counter() - started
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        found = {
            "reward": sum(rewards) / len(rewards),
            "mixed_groups": sum(len(set(group)) > 1 for group in groups),
            "truncated": cut / len(rewards),
            "tokens": tokens,
            "seconds": round(seconds, 1),
        }
        self.ledger.add(**key, machine=MACHINE, **found)
        print(key, found, flush=True)

    # ---- training ----

    def run_config(self, arm: str, seed: int, steps: int) -> RunConfig:
        """Return the run of an arm: the profile with its reward."""
        num_examples, temperature = choose_setting(self.ledger)
        rewards = {"accuracy": accuracy_reward, "form": format_reward, "shuffled": shuffled(accuracy_reward, seed)}
        return replace(
            PROFILE,
            model=self.model,
            data_path=self.data,
            dtype=DTYPE,
            num_examples=num_examples,
            num_problems=self.num_problems,
            reward_funcs=(rewards[arm],),
            config=replace(PROFILE.config, temperature=temperature, seed=seed, max_steps=steps),
            num_heldout=2,
            greedy=False,
        )

    def train_arm(self, arm: str, seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
        """Return the policy after a run, its tokenizer and what the run took; a run that was stopped goes on."""
        if arm == "supervised":
            return self.train_supervised(seed, steps)
        folder, run_config = FOLDER / f"{arm}-{seed}-{steps}", self.run_config(arm, seed, steps)
        rows = finish_run(folder, run_config, COMMAND)
        base, tokenizer = self.open_model(run_config.num_examples)
        return load_adapters(base, folder / "adapters"), tokenizer, summarize_steps(rows)

    def train_supervised(self, seed: int, steps: int) -> tuple[Any, Any, dict[str, Any]]:
        """Learn GSM8K's own solutions with as many tokens as the accuracy arm of this seed processed."""
        like = self.ledger.find(phase="report", arm="accuracy", seed=seed, steps=steps)
        if like is None:
            raise SystemExit("The arm accuracy has to run before supervised training on as many tokens")
        base, tokenizer = self.open_model(choose_setting(self.ledger)[0])
        torch.manual_seed(seed)
        model = add_lora(base, rank=PROFILE.lora_rank)
        problems = load_gsm8k("train", self.data, n=self.num_problems)[NUM_EXAMPLES:]
        random.Random(seed).shuffle(problems)
        config = SupervisedConfig(max_steps=10**6, learning_rate=SUPERVISED_RATE, seed=seed)
        started = time.perf_counter()
        tokens = finetune_for(model, tokenizer, problems, config, like["tokens"])
        return model, tokenizer, {"tokens": tokens, "seconds": round(time.perf_counter() - started, 1)}

    # ---- judgement ----

    def judge(
        self, model: Any, tokenizer: Any, ways: Sequence[str] = tuple(WAYS), max_completion_length: int = LENGTH
    ) -> dict[str, Any]:
        """Return the three readings of a greedy and of a sampled answer to each test problem."""
        found: dict[str, Any] = {}
        for way in ways:
            answers = evaluate(
                model,
                tokenizer,
                self.tests,
                temperature=WAYS[way],
                max_completion_length=max_completion_length,
                batch_size=50,
                seed=1,
            )
            found |= {f"{way}/{name}": value for name, value in read_answers(answers.completions, self.tests).items()}
            found[f"{way}/completions"] = list(answers.completions) if way == "greedy" else []
        return found

    def report_prompt(self, num_examples: int) -> None:
        """Judge the untrained model with so many examples in its prompt."""
        key = {"phase": "untrained", "num_examples": num_examples}
        if self.ledger.wants(**key):
            self.ledger.add(**key, machine=MACHINE, **self.judge(*self.open_model(num_examples)))
            print_judgement(self.ledger.rows[-1])

    def report_longer(self, arm: str, num_examples: int, seed: int, steps: int) -> None:
        """Judge the greedy answers of the untrained model or of an arm with `LONGER` tokens."""
        if (arm, num_examples) in longer_rows(self.ledger) or self.ledger.late:
            return
        model, tokenizer = self.open_model(num_examples)
        if arm != "untrained":
            model = load_adapters(model, FOLDER / f"{arm}-{seed}-{steps}" / "adapters")
        found = self.judge(model, tokenizer, ["greedy"], LONGER)
        self.ledger.add(phase="longer", arm=arm, num_examples=num_examples, machine=MACHINE, **found)
        print_judgement(self.ledger.rows[-1])

    def report_arm(self, arm: str, seed: int, steps: int) -> None:
        """Train an arm and judge it."""
        key = {"phase": "report", "arm": arm, "seed": seed, "steps": steps}
        if self.ledger.wants(**key):
            model, tokenizer, spent = self.train_arm(arm, seed, steps)
            self.ledger.add(**key, machine=MACHINE, **spent, **self.judge(model, tokenizer))
            print_judgement(self.ledger.rows[-1])


def read_answers(completions: Sequence[str], problems: Sequence[Problem]) -> dict[str, str]:
    """Return a 1 or 0 for each completion: right as its final answer, right as its last number, and readable at all.

    >>> problems = [Problem("2 + 3?", "5")] * 3
    >>> read_answers(["2 + 3 = 5\\n#### 5", "It is **5**.", "#### 6"], problems)
    {'strict': '100', 'lenient': '110', 'readable': '101'}
    """
    pairs = list(zip(completions, problems, strict=True))
    return {
        "strict": bits(accuracy_reward(list(completions), answer=[problem.answer for problem in problems])),
        "lenient": bits(same_number(last_number(text), problem.answer.replace(",", "")) for text, problem in pairs),
        "readable": bits(extract_answer(text) is not None for text in completions),
    }


def summarize_steps(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run with these metrics took, and its rewards."""
    return {
        "reward": [round(row["reward"], 4) for row in rows],
        "tied": [round(row["frac_reward_zero_std"], 4) for row in rows],
        "truncated": [round(row["completions/clipped_ratio"], 4) for row in rows],
        "tokens": rows[-1]["num_tokens"],
        "step_seconds": [round(row["step_time"], 1) for row in rows],
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def choose_setting(ledger: Ledger) -> tuple[int, float]:
    """Return the number of examples and the temperature by the rule, see the head of this module."""
    rows = [row for row in ledger.select(phase="select") if row["truncated"] <= 0.25]
    best = max(rows, key=lambda row: (row["mixed_groups"], -row["tokens"]))
    return best["num_examples"], best["temperature"]


def longer_rows(ledger: Ledger) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows with `LONGER` tokens, by the arm or "untrained" and the number of examples."""
    found = {(row["arm"], row["num_examples"]): row for row in ledger.select(phase="longer")}
    first = ledger.find(phase="untrained, longer")  # before the others were asked in this way
    return ({("untrained", 0): first} if first else {}) | found


def name_prompt(num_examples: int, longer: bool = False) -> str:
    """Return the name of a prompt in the summary.

    >>> name_prompt(3), name_prompt(0, longer=True)
    ('3 examples', '0 examples, 512 tokens')
    """
    return f"{num_examples} examples" + (f", {LONGER} tokens" if longer else "")


def count_answers(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return how many answers of a judged row count in each reading, with Wilson's 95% interval."""
    return {name: counted(row[name]) for name in READINGS if name in row}


def count_equations(row: dict[str, Any]) -> dict[str, int]:
    """Return how many equations the greedy answers of a judged row have, and how many of them are false."""
    verdicts = [holds for text in row["greedy/completions"] for holds in check_equations(text)]
    return {"equations": len(verdicts), "false": verdicts.count(False)}


def compare_rows(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return after − before in each reading, with the 95% interval over problems and McNemar's exact test.

    The strict reading is also compared on the problems where both answers are readable.
    """
    pairs = {name: (ones(before[name]), ones(after[name])) for name in READINGS if name in before}
    for way in WAYS:
        if f"{way}/readable" in pairs:
            both = [old and new for old, new in zip(*pairs[f"{way}/readable"], strict=True)]
            old_strict, new_strict = (list(compress(solved, both)) for solved in pairs[f"{way}/strict"])
            pairs[f"{way}/strict where both are readable"] = old_strict, new_strict
    changes = {}
    for name, (old, new) in pairs.items():
        changes[name] = {"problems": len(old), **vars(paired_bootstrap(old, new)), **vars(mcnemar(old, new))}
    return changes


def summary(ledger: Ledger) -> dict[str, Any]:
    """Return what the rule chose, the counts of the untrained model and of each run, and what each run changed."""
    num_examples, temperature = choose_setting(ledger)
    chosen, longer = name_prompt(num_examples), longer_rows(ledger)
    untrained = {name_prompt(row["num_examples"]): row for row in ledger.select(phase="untrained")}
    untrained |= {name_prompt(count, longer=True): row for (arm, count), row in longer.items() if arm == "untrained"}
    found: dict[str, Any] = {
        "chosen": {"num_examples": num_examples, "temperature": temperature},
        "untrained": {name: count_answers(row) for name, row in untrained.items()},
        "equations of the untrained model": count_equations(untrained[chosen]),
        "runs": [],
        "longer": compare_longer(longer),
    }
    for row in ledger.select(phase="report"):
        run = {name: row[name] for name in ("arm", "seed", "steps", "machine", "tokens")}
        run |= {"counts": count_answers(row), "equations": count_equations(row)}
        run["change"] = compare_rows(untrained[chosen], row)
        others = {name: other for name, other in untrained.items() if name != chosen}
        run["change from others"] = {name: compare_rows(other, row) for name, other in others.items()}
        accuracy = ledger.find(phase="report", arm="accuracy", seed=row["seed"], steps=row["steps"])
        if accuracy and row is not accuracy:
            run["accuracy minus this"] = compare_rows(row, accuracy)
        found["runs"].append(run)
    return found


def compare_longer(longer: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Return the counts of each trained model with `LONGER` tokens, and its change from the untrained one."""
    found: dict[str, Any] = {}
    for (arm, count), row in longer.items():
        before = longer.get(("untrained", count))
        if arm != "untrained" and before:
            compared = {"counts": count_answers(row), "change": compare_rows(before, row)}
            found[f"{arm}, {name_prompt(count, longer=True)}"] = compared
    return found


def print_judgement(row: dict[str, Any]) -> None:
    """Print the shares of a judged row."""
    who = {name: row.get(name) for name in ("phase", "arm", "seed", "num_examples") if name in row}
    print(who, {name: round(share(row[name]), 3) for name in READINGS if name in row}, flush=True)


def main() -> int:
    """Run what is missing."""
    parser = ledger_options(COMMAND, (__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=PROFILE.model, help="a GGUF file, a folder or a Hub id of the model")
    parser.add_argument("--data", default=GSM8K, help="the folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["accuracy", "form"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=PROFILE.config.max_steps)
    options = parser.parse_args()
    study = Study(options.model, str(options.data), Ledger(LEDGER, options.minutes))
    for setting in SETTINGS:
        study.measure_setting(*setting)
    for seed in options.seeds:
        for arm in options.arms:
            study.report_arm(arm, seed, options.steps)
    for num_examples in (0, NUM_EXAMPLES):
        study.report_prompt(num_examples)
    for arm, num_examples in LONGER_ROWS:
        if arm in ("untrained", *options.arms):
            study.report_longer(arm, num_examples, options.seeds[0], options.steps)
    if not study.ledger.late:  # otherwise rows may be missing that the summary compares with
        save(LEDGER.with_suffix(".json"), COMMAND, summary(study.ledger))
    return 0


if __name__ == "__main__":
    sys.exit(main())
