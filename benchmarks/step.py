"""A whole GRPO step and its rollout against stock TRL and transformers: ``python -m benchmarks.step --scale tiny``.

The sides take turns, each training in a process of its own. *tiny*: the shipped model, 16 prompts × 8 completions of
up to 96 tokens. *494M*: the shape of Qwen2-0.5B-Instruct with random weights, 1 prompt of 128 tokens × 8 completions
of 64, where only one side fits in memory at a time. *smollm2*: SmolLM2-135M-Instruct, 16 instructions × 8 completions
of up to 48 tokens, learned in eight micro-batches. Stock TRL is its `GRPOTrainer` with transformers' `generate`, on
the same problems, reward and settings, in float32 without gradient checkpointing, and at 494M also as it comes
(bfloat16 autocast, gradient checkpointing). The learning rate is so small that the policy, and with it the work, stays
the same.

Prints tables and writes ``benchmarks/results/step_SCALE.json``, with the floor: the least time that the step's products
and memory traffic would take at this machine's measured rates, and a profile: the seconds of each phase of a step of
this package. tiny: 2 minutes; 494M: 10, and ``--parts`` takes it piece by piece.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness import (
    RESULTS,
    between,
    exit_code,
    in_turn,
    markdown,
    save,
    spread,
    steps_in_turn,
    times_as_fast,
)
from grpo_edu import GRPOConfig, accuracy_reward, generate, load_policy, load_problems, render_prompt, train
from grpo_edu.batch import score_rollout
from grpo_edu.fast.optimizers import clip_and_step
from grpo_edu.machine.step_process import never_tied
from grpo_edu.problems.templates import LEVELS, Problem, prompt_options
from grpo_edu.scale.trl_backend import train_with_trl, trl_settings
from grpo_edu.trainer import Stages, start_training

SCALES = ("tiny", "smollm2", "494M")
ROUNDS = {"tiny": 7, "smollm2": 3, "494M": 1}
PARTS = ("step", "rollout", "floor", "phases")
STILL = 1e-7  # a learning rate at which the policy stays what it is
TINY = GRPOConfig(learning_rate=STILL, max_steps=10_000)
LARGE = GRPOConfig(prompts_per_step=1, max_completion_length=64, learning_rate=STILL, max_steps=10_000)
LARGE_PROMPT = 128
SMOLLM2 = replace(TINY, max_completion_length=48, gradient_accumulation_steps=8)
TARGETS = {"tiny": {"step": 4.0, "rollout": 3.0}, "smollm2": {"step": 4.0, "rollout": 2.5}, "494M": {"step": 3.0}}


def large_policy(dtype: str = "float32"):
    """Return a model of the shape of Qwen2-0.5B-Instruct with random weights, and the tiny model's tokenizer."""
    from transformers import Qwen2ForCausalLM

    from benchmarks.memory import large_config

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(large_config()).to(getattr(torch, dtype))
    return model.eval(), load_policy("tiny")[1]


def long_problem(tokenizer, length: int) -> Problem:
    """Return a problem whose rendered prompt has `length` tokens."""
    for count in range(length):
        problem = Problem("1 " * count + "1", "1", "basic", "#### 1")
        if len(tokenizer.encode(render_prompt(tokenizer, problem.prompt))) >= length:
            return problem
    raise ValueError(f"length: no prompt reaches {length} tokens")


def start_tiny(config: GRPOConfig, backend: Callable) -> Iterator[dict]:
    """Return the steps of a training run of the shipped model."""
    return backend(*load_policy("tiny"), load_problems(LEVELS, "train"), accuracy_reward, config)


def start_smollm2(config: GRPOConfig, backend: Callable) -> Iterator[dict]:
    """Return the steps of a training run of SmolLM2-135M-Instruct on instructions; the reward never ties."""
    return backend(*load_policy("smollm2"), load_problems("instructions", "train"), never_tied, config)


def start_large(backend: Callable, dtype: str) -> Iterator[dict]:
    """Return the steps of a training run of Qwen2-0.5B's shape; its weights are made first, and one token decoded."""
    model, tokenizer = large_policy(dtype)
    warm_up = replace(LARGE, max_completion_length=1, num_generations=2, max_steps=1)
    for _ in backend(model, tokenizer, [long_problem(tokenizer, 1)], never_tied, warm_up):
        pass
    return backend(model, tokenizer, [long_problem(tokenizer, LARGE_PROMPT)], never_tied, LARGE)


def stock_as_it_comes(model, tokenizer, problems, reward, config: GRPOConfig) -> Iterator[dict]:
    """Stock TRL with the mixed precision and the gradient checkpointing that it has by default."""
    import trl

    with tempfile.TemporaryDirectory() as folder:
        settings = trl_settings(config) | {"bf16": True, "gradient_checkpointing": True}
        arguments = trl.GRPOConfig(output_dir=folder, **settings)
        yield from train_with_trl(
            model, tokenizer, problems, reward, config, rollout="transformers", arguments=arguments
        )


def sides(scale: str) -> dict[str, Callable[[], Iterator[dict]]]:
    """Return the training runs of a scale, stock TRL first."""
    stock = partial(train_with_trl, rollout="transformers")
    if scale == "tiny":
        return {
            "stock TRL": partial(start_tiny, TINY, stock),
            "TRL with this rollout": partial(start_tiny, TINY, train_with_trl),
            "grpo_edu": partial(start_tiny, TINY, train),
        }
    if scale == "smollm2":
        return {"stock TRL": partial(start_smollm2, SMOLLM2, stock), "grpo_edu": partial(start_smollm2, SMOLLM2, train)}
    return {
        "stock TRL": partial(start_large, stock, "float32"),
        "stock TRL, as it comes": partial(start_large, stock_as_it_comes, "float32"),
        "stock TRL, bfloat16 weights": partial(start_large, stock, "bfloat16"),
        "grpo_edu": partial(start_large, train, "float32"),
        "grpo_edu, bfloat16 weights": partial(start_large, train, "bfloat16"),
    }


def rollouts(model, tokenizer, prompts: list[str], config: GRPOConfig) -> dict[str, Callable[[], Any]]:
    """Ways to sample the same completions, from text to text."""
    generator = torch.Generator().manual_seed(0)

    def ours() -> None:
        generate(
            model,
            tokenizer,
            prompts,
            num_generations=config.num_generations,
            max_completion_length=config.max_completion_length,
            generator=generator,
        )

    def theirs(**options: Any) -> None:
        repeated = [prompt for prompt in prompts for _ in range(config.num_generations)]
        encoded = tokenizer(repeated, padding=True, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=config.max_completion_length,
                disable_compile=True,
                **options,
            )
        tokenizer.batch_decode(ids[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)

    return {
        "transformers' generate": theirs,
        "transformers' generate, static cache": partial(theirs, cache_implementation="static"),
        "grpo_edu": ours,
    }


def rates(dtype: torch.dtype) -> dict[str, float]:
    """Return what this machine reaches: FLOP/s of a large product, bytes/s of a product that reads a matrix once."""
    square, tall = torch.ones(1024, 1024, dtype=dtype), torch.ones(40_000, 1024, dtype=dtype)
    best = {"flops": 0.0, "bytes": 0.0}
    with torch.inference_mode():
        for _ in range(12):
            started = time.perf_counter()
            square @ square
            best["flops"] = max(best["flops"], 2 * 1024**3 / (time.perf_counter() - started))
            started = time.perf_counter()
            torch.nn.functional.linear(square[:1], tall)
            best["bytes"] = max(best["bytes"], tall.nbytes / (time.perf_counter() - started))
    return best


def floor_seconds(weights: int, width: int, step: dict[str, float], rate: dict[str, float]) -> dict[str, float]:
    """Return the least time that a step can take, whoever makes it, without sharing what completions have in common.

    rollout = prompt forward (2 FLOPs a weight and token) + a reading of all weights for every decode step, or the
    products of its rows where they take longer. update = 6 FLOPs a weight and token, prompts once a group, and
    AdamW's 28 bytes a weight.

    Args:
        weights: numbers in the model. width: bytes of each.
        step: prompt_tokens (of the distinct prompts), completion_tokens, decode_steps.
        rate: flops and bytes a second.

    >>> step = {"prompt_tokens": 10, "completion_tokens": 40, "decode_steps": 5}
    >>> floor_seconds(1000, 4, step, {"flops": 1e4, "bytes": 1e5})
    {'rollout': 10.0, 'update': 30.28}
    """
    reading = step["decode_steps"] * weights * width / rate["bytes"]
    products = 2 * weights * step["completion_tokens"] / rate["flops"]
    tokens = step["prompt_tokens"] + step["completion_tokens"]
    return {
        "rollout": 2 * weights * step["prompt_tokens"] / rate["flops"] + max(reading, products),
        "update": 6 * weights * tokens / rate["flops"] + 28 * weights / rate["bytes"],
    }


def compare_steps(sides: dict[str, Callable[[], Iterator[dict]]], rounds: int, *, keep: bool) -> dict[str, dict]:
    """Time a step on each side; return the seconds, and how many times as fast as the first each is."""
    steps = steps_in_turn(sides, rounds, keep=keep)
    seconds = {name: [step["seconds"] for step in found] for name, found in steps.items()}
    return {
        name: {
            "seconds": spread(seconds[name]),
            "times as fast as stock TRL": times_as_fast(next(iter(seconds.values())), seconds[name]),
            "completion tokens": spread([step["completions/mean_length"] for step in found]),
        }
        for name, found in steps.items()
    }


def compare_rollouts(model, tokenizer, prompts: list[str], config: GRPOConfig, rounds: int) -> dict[str, dict]:
    """Time a rollout each way; return the seconds, and how many times as fast as the first each is."""
    seconds = in_turn(rollouts(model, tokenizer, prompts, config), rounds)
    base = next(iter(seconds.values()))
    return {
        name: {"seconds": spread(found), "times as fast as transformers": times_as_fast(base, found)}
        for name, found in seconds.items()
    }


def floors(model, tokenizer, prompts: list[str], config: GRPOConfig) -> dict[str, Any]:
    """Return the floor of a step of this setting, from one rollout's own counts and this machine's rates."""
    rollout = generate(
        model,
        tokenizer,
        prompts,
        num_generations=config.num_generations,
        max_completion_length=config.max_completion_length,
    )
    step = {
        "prompt_tokens": int(rollout.prompt_mask[:: config.num_generations].sum()),
        "completion_tokens": int(rollout.completion_mask.sum()),
        "decode_steps": rollout.completion_ids.shape[1] - 1,
    }
    rate = rates(model.dtype)
    found = floor_seconds(model.num_parameters(), model.dtype.itemsize, step, rate)
    return {"counts": step, "rates": rate, "seconds": found}


class Stopwatch:
    """Adds up the seconds that functions take, and counts their calls, by name.

    >>> watch = Stopwatch()
    >>> watch.timed("sums", sum)([1, 2]), list(watch.seconds), watch.seconds["sums"] > 0
    (3, ['sums'], True)
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def timed(self, name: str, function: Callable) -> Callable:
        """Return the same function, with its seconds added up under `name`."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
                self.counts[name] += 1

        return call


def phases(model, tokenizer, problems: list[Problem], reward: Callable, config: GRPOConfig, rounds: int) -> dict:
    """Time each phase of a training step of this package; one step before them does not count.

    "forward pass" is what remains of the step: besides the forward pass and the loss, the trainer's own bookkeeping.
    """
    state, watch = start_training(model, tokenizer, problems, config), Stopwatch()
    state.sampler.generate = watch.timed("rollout", state.sampler.generate)
    stages = Stages(score=watch.timed("rewards", score_rollout))
    steps: dict[str, list[float]] = {}
    with (
        patch.object(torch.Tensor, "backward", watch.timed("backward pass", torch.Tensor.backward)),
        patch("grpo_edu.trainer.clip_and_step", watch.timed("optimizer", clip_and_step)),
    ):
        for metrics in train(model, tokenizer, problems, reward, config, state=state, stages=stages):
            step, watch.seconds = watch.seconds, {}
            if metrics["step"] == 1:
                continue
            step["forward pass"] = metrics["step_time"] - sum(step.values())
            for name, seconds in (step | {"whole step": metrics["step_time"]}).items():
                steps.setdefault(name, []).append(seconds)
            if metrics["step"] > rounds:
                break
    return {name: spread(seconds) for name, seconds in steps.items()}


def profile(scale: str, rounds: int) -> dict[str, dict]:
    """Return the phases of a step at one scale, by the dtype of the weights."""
    if scale == "tiny":
        return {"float32": phases(*load_policy("tiny"), load_problems(LEVELS, "train"), accuracy_reward, TINY, rounds)}
    if scale == "smollm2":
        problems = load_problems("instructions", "train")
        return {"float32": phases(*load_policy("smollm2"), problems, never_tied, SMOLLM2, rounds)}
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = large_policy(dtype)
        problems = [long_problem(tokenizer, LARGE_PROMPT)]
        found[dtype] = phases(model, tokenizer, problems, never_tied, LARGE, rounds)
    return found


def setting(scale: str) -> tuple:
    """Model, tokenizer, prompts and settings of a rollout; at 494M in bfloat16, as a rollout there should be."""
    if scale == "tiny":
        model, tokenizer = load_policy("tiny")
        problems, config = load_problems(LEVELS, "train"), TINY
        problems = problems[:: len(problems) // config.prompts_per_step][: config.prompts_per_step]
    elif scale == "smollm2":
        model, tokenizer = load_policy("smollm2")
        config = SMOLLM2
        problems = load_problems("instructions", "train")[: config.prompts_per_step]
    else:
        model, tokenizer = large_policy("bfloat16")
        problems, config = [long_problem(tokenizer, LARGE_PROMPT)], LARGE
    prompts = [render_prompt(tokenizer, problem.prompt, **prompt_options(problem.level)) for problem in problems]
    return model, tokenizer, prompts, config


def measure(scale: str, part: str, rounds: int) -> dict[str, Any]:
    """Measure one part of a scale."""
    if part == "step":
        return compare_steps(sides(scale), rounds, keep=scale != "494M")
    if part == "rollout":
        return compare_rollouts(*setting(scale), rounds)
    if part == "phases":
        return profile(scale, rounds)
    return floors(*setting(scale))


def verdicts(record: dict[str, Any], scale: str) -> dict[str, bool]:
    """Return the targets, each judged on the median of the rounds, with weights in float32 on both sides."""
    judged = {}
    for part, target in TARGETS[scale].items():
        if part not in record:
            continue
        row = record[part]["grpo_edu"]
        ratio = row[next(key for key in row if key.startswith("times"))]["median"]
        judged[f"a {part} at {scale} is at least {target:g} times as fast"] = ratio >= target
    return judged


def tables(record: dict[str, Any]) -> str:
    """Both tables, and the floor."""
    lines = []
    for part in ("step", "rollout"):
        rows = []
        for name, row in record.get(part, {}).items():
            ratio = next(key for key in row if key.startswith("times"))
            rows.append({part: name, "seconds": between(row["seconds"]), ratio: between(row[ratio])})
        lines += [markdown(rows), ""] if rows else []
    if "floor" in record:
        floor = record["floor"]["seconds"]
        lines.append(f"floor: rollout {floor['rollout']:.2f} s, update {floor['update']:.2f} s")
    rows = [
        {"weights": dtype, **{name: between(seconds) for name, seconds in found.items()}}
        for dtype, found in record.get("phases", {}).items()
    ]
    lines += ["", markdown(rows)] if rows else []
    return "\n".join(lines)


def main() -> int:
    """Measure the parts of one scale, keep those that were measured before; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="tiny")
    parser.add_argument("--rounds", type=int, help="steps of each side that count (default: 7, smollm2: 3, 494M: 1)")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="what to measure again (default: all)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/step_SCALE.json")
    options = parser.parse_args()
    rounds = ROUNDS[options.scale] if options.rounds is None else options.rounds
    output = options.output or RESULTS / f"step_{options.scale}.json"
    before = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    found = {part: measure(options.scale, part, rounds) for part in options.parts}
    record = {part: found.get(part) or before[part] for part in PARTS if part in {*found, *before}}
    record["verdicts"] = verdicts(record, options.scale)
    save(output, f"python -m benchmarks.step --scale {options.scale}", record)
    print(tables(record))
    return exit_code(record["verdicts"])


if __name__ == "__main__":
    raise SystemExit(main())
