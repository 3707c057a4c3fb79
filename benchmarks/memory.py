"""Peak memory of GRPO steps, measured as a whole process and estimated: ``python -m benchmarks.memory``.

Every case is a process of its own: it loads the model, makes two steps of `grpo_edu.train` (from the second on the
optimizer's states are there) and reports the most memory that it ever held. The 494M cases have the shape of
Qwen2-0.5B-Instruct with random weights, loaded from a file in bfloat16, one prompt of 128 tokens and 8 completions of
64. The SmolLM2 cases have 8 instructions × 8 completions of at most 48 tokens. Prints a table and writes
``benchmarks/results/memory.json``. All cases take about 25 minutes on two cores and 12 GB; ``--cases`` chooses.
Rows of cases that this version does not have stay in the record: grpo_edu 0.3.0 could step within the backward pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness import RESULTS, exit_code, save

COMMAND = "python -m benchmarks.memory"
LARGE_PROMPT, LARGE_COMPLETION = 128, 64
SMOLLM2 = {"prompts_per_step": 8, "max_completion_length": 48}

# name → model, dtype, LoRA rank (0: all weights learn), changes of the config, and the bound in GB that is claimed.
CASES: dict[str, dict] = {
    "tiny, the default run": {"model": "tiny"},
    "tiny, gradient checkpointing": {"model": "tiny", "config": {"gradient_checkpointing": True}},
    "tiny, 32 prompts": {"model": "tiny", "config": {"prompts_per_step": 32}},
    "tiny, 32 prompts in 4 passes": {
        "model": "tiny",
        "config": {"prompts_per_step": 32, "gradient_accumulation_steps": 4},
    },
    "full, AdamW": {"model": "494M"},
    "full, Adafactor": {"model": "494M", "config": {"optim": "adafactor", "gradient_checkpointing": True}},
    "LoRA, float32": {"model": "494M", "lora": 16},
    "LoRA, float32, gradient checkpointing": {"model": "494M", "lora": 16, "config": {"gradient_checkpointing": True}},
    "LoRA, bfloat16": {"model": "494M", "dtype": "bfloat16", "lora": 16},
    "LoRA, bfloat16, gradient checkpointing": {
        "model": "494M",
        "dtype": "bfloat16",
        "lora": 16,
        "config": {"gradient_checkpointing": True},
        "bound": 3.3,
    },
    "SmolLM2, LoRA within a budget": {
        "model": "smollm2",
        "lora": 8,
        "config": {**SMOLLM2, "memory_budget_gib": 1.5},
        "bound": 2.0,
    },
}

WARM_UP = {"model": "tiny", "config": {"prompts_per_step": 1, "num_generations": 2, "max_completion_length": 4}}


def write_large_model(folder: Path) -> None:
    """Save a model of the shape of Qwen2-0.5B with random weights in bfloat16, as the Hub has it, and a tokenizer."""
    import torch
    from transformers import Qwen2ForCausalLM

    from grpo_edu.models import load_policy, save_policy

    torch.manual_seed(0)
    save_policy(Qwen2ForCausalLM(large_config()).to(torch.bfloat16), load_policy("tiny")[1], folder)


def large_config():
    """Return the shape of Qwen/Qwen2-0.5B-Instruct: 494 million parameters."""
    from grpo_edu.fast.memory_estimate import shape_config

    return shape_config("494M")


def run_case(case: dict, folder: Path, steps: int = 2) -> dict:
    """Make the steps of one case in this process; returns bytes, the parts of the estimate, and a step's seconds."""
    import torch

    from grpo_edu.fast.memory import PeakMemory

    torch.manual_seed(0)
    make_steps(WARM_UP, folder, 1)  # so that all libraries are there, with what they set up at their first use
    with PeakMemory() as memory:
        estimates, seconds = make_steps(case, folder, steps)
    estimate = max(estimates, key=lambda estimate: estimate.peak)
    return {
        "peak": memory.peak,
        "libraries": memory.start,
        "estimate": memory.start + estimate.peak,
        "parts": asdict(estimate),
        "seconds": round(seconds, 2),
    }


def make_steps(case: dict, folder: Path, steps: int) -> tuple[list, float]:
    """Load the model and make the steps as `grpo_edu.train` does; an estimate for each, and the last one's seconds."""
    import torch

    from grpo_edu.batch import rows_with_gradient, score_rollout
    from grpo_edu.config import GRPOConfig
    from grpo_edu.fast.lora import add_lora
    from grpo_edu.machine.step_process import never_tied
    from grpo_edu.models import load_policy
    from grpo_edu.trainer import Training, start_training, update_policy

    is_large = case["model"] == "494M"
    sizes = {"prompts_per_step": 1, "max_completion_length": LARGE_COMPLETION} if is_large else {}
    config = GRPOConfig(**{**sizes, **case.get("config", {})})
    model, tokenizer = load_policy(folder if is_large else case["model"], dtype=case.get("dtype"))
    if case.get("lora"):
        model = add_lora(model, rank=case["lora"])
    problems, prompts = large_prompts(tokenizer) if is_large else small_prompts(case["model"], tokenizer, config)
    state = start_training(model, tokenizer, problems, config)
    training = Training(model, tokenizer, problems, [never_tied], config, state)
    estimates = []
    for _ in range(steps):
        started = time.perf_counter()
        rollout = state.sampler.generate(prompts, state.generator)
        batch = score_rollout(rollout, problems, [never_tied], config)
        update_policy(training, batch)
        seconds = time.perf_counter() - started
        converted = is_large and model.dtype != torch.bfloat16
        file_bytes = (folder / "model.safetensors").stat().st_size if converted else 0
        parts = state.micro_batches.cut(rollout, rows_with_gradient(batch, config))
        estimates += [estimate_of(part, model, batch, config, file_bytes) for part in parts]
    return estimates, seconds


def small_prompts(model: str, tokenizer, config) -> tuple[list, list[str]]:
    """Return the first training problems of the levels in turn (SmolLM2: instructions), and their prompts."""
    from grpo_edu.problems.files import load_problems
    from grpo_edu.problems.templates import LEVELS, prompt_options
    from grpo_edu.prompts import render_prompt

    levels = [load_problems(level, "train") for level in (["instructions"] if model == "smollm2" else LEVELS)]
    problems = [problem for row in zip(*levels, strict=False) for problem in row][: config.prompts_per_step]
    return problems, [render_prompt(tokenizer, one.prompt, **prompt_options(one.level)) for one in problems]


def large_prompts(tokenizer) -> tuple[list, list[str]]:
    """Return one prompt of `LARGE_PROMPT` tokens."""
    from grpo_edu.problems.templates import Problem

    text = tokenizer.decode([tokenizer.encode("1")[-1]] * LARGE_PROMPT)
    return [Problem(prompt=text, answer="1", level="basic", solution="1")], [text]


def estimate_of(part, model, batch, config, file_bytes):
    """`estimate_memory` for the shapes of one pass."""
    from grpo_edu.fast.memory_estimate import estimate_memory
    from grpo_edu.fast.packing import pack_groups

    rollout = batch.rollout
    tensors = (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    group = min(len(part), config.num_generations)  # a pass of a tight budget holds a part of a group
    rows = pack_groups(*(tensor[part] for tensor in tensors), group)
    return estimate_memory(
        model,
        config,
        prompt_length=rollout.prompt_ids.shape[1],
        row_length=rows.input_ids.shape[1],
        completion_length=round(rollout.completion_mask[part].sum(dim=1).float().mean().item()),
        prompts_per_pass=len(rows.input_ids),
        file_bytes=file_bytes,
    )


def measure(name: str, folder: Path) -> dict:
    """Run one case in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory", "--case", name, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {"case": name, **CASES[name], **json.loads(done.stdout.strip().splitlines()[-1])}


def table(rows: list[dict]) -> str:
    """Return the cases as a Markdown table, in GB of 10^9 bytes."""
    parts = ("weights", "gradients", "optimizer", "cache", "activations", "logits", "scratch", "loading")
    lines = [f"| case | peak | estimate | {' | '.join(parts)} | libraries | seconds a step |"]
    lines.append("|---|" + "---|" * (len(parts) + 4))
    for row in rows:
        sizes = [row["peak"], row["estimate"], *(row["parts"][part] for part in parts), row["libraries"]]
        cells = [row["case"], *(f"{size / 1e9:.2f}" for size in sizes), f"{row['seconds']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(rows: list[dict]) -> dict[str, bool]:
    """Return what the course says about memory, judged on every case that was run."""
    judged = {"the estimate is within 15% of every peak": all(abs(r["estimate"] / r["peak"] - 1) < 0.15 for r in rows)}
    for row in rows:
        if "bound" in row:
            judged[f"{row['case']}: at most {row['bound']} GB"] = row["peak"] <= row["bound"] * 1e9
    return judged


def main() -> int:
    """Run the cases; exit 1 if a statement does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="NAME", help="(default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS / "memory.json")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(CASES[options.case], options.folder)))
        return 0
    names, rows = options.cases or list(CASES), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "large"
        if any(CASES[name]["model"] == "494M" for name in names):
            write_large_model(folder)
        for name in names:
            rows.append(measure(name, folder))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    judged = verdicts(rows)
    stored = json.loads((RESULTS / "memory.json").read_text(encoding="utf-8"))["cases"]
    others = [row for row in stored if row["case"] not in CASES]
    save(options.output, COMMAND, {"verdicts": judged, "cases": rows + others})
    print("\n" + table(rows) + "\n")
    return exit_code(judged)


if __name__ == "__main__":
    sys.exit(main())
