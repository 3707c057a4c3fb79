"""Quantized sampling at the size of Qwen2-0.5B: ``python -m benchmarks.quantization_speed``.

A model of that shape with random weights, in float32 and in each scheme. Measured: bytes, the time to quantize, a
decode step with 1 and with 8 rows (all in turn, so that a slow minute slows all alike), and a rollout of 8 completions
of 64 tokens by float32 and by int8. "Packed" is the same model with the weights in oneDNN's own layout, as rollouts
of several completions use it (`grpo_edu.fast.packed_weights`). Then the probe is asked which scheme is fastest with 8
rows. 4 minutes, 12 GB.
Writes ``benchmarks/results/quantization_speed.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.harness import RESULTS, between, exit_code, in_turn, markdown, save, spread, times_as_fast
from benchmarks.quantization_probe import probe_schemes
from benchmarks.step import LARGE, LARGE_PROMPT, large_policy, long_problem
from grpo_edu import generate, render_prompt
from grpo_edu.config import QUANTIZATION_SCHEMES
from grpo_edu.fast.packed_weights import packed_dtypes, packed_weights
from grpo_edu.quantization.model import quantize_model, stored_bytes

COMMAND = "python -m benchmarks.quantization_speed"
ROWS = (1, 8)
CONTEXT = 128  # tokens that a decode step attends to
ROLLOUT = "int8-dynamic"
PARTS = ("decode", "rollout")
RECORDED = ("verdicts", "bytes", "decode", "probe", "rollout")


def decode_step(model, rows: int, context: int = CONTEXT) -> Callable[[], None]:
    """Return a function that decodes the same token for each of `rows` rows after `context` tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    prompt = torch.arange(rows * context).view(rows, context) % model.config.vocab_size
    token = prompt[:, :1]
    with torch.inference_mode():
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=token, past_key_values=cache, use_cache=True)
            cache.crop(-1)

    return step


def decode_times(models: dict, rows: int, rounds: int) -> dict[str, dict]:
    """Milliseconds of a decode step of each model, and how many times as fast as the first."""
    seconds = in_turn({name: decode_step(model, rows) for name, model in models.items()}, rounds)
    base = next(iter(seconds.values()))
    return {
        name: {"ms": spread([1000 * value for value in found]), "times as fast": times_as_fast(base, found)}
        for name, found in seconds.items()
    }


def rollout_times(model, tokenizer, rounds: int) -> dict[str, dict]:
    """Time rollouts by the policy, and by a copy that is quantized for each, as in a training run."""
    prompt = render_prompt(tokenizer, long_problem(tokenizer, LARGE_PROMPT).prompt)
    quantizing: list[float] = []

    def sample(scheme: str | None) -> None:
        started = time.perf_counter()
        sampler = quantize_model(model, scheme) if scheme else model
        if scheme:
            quantizing.append(time.perf_counter() - started)
        generate(
            sampler,
            tokenizer,
            [prompt],
            num_generations=LARGE.num_generations,
            max_completion_length=LARGE.max_completion_length,
            generator=torch.Generator().manual_seed(0),
        )

    seconds = in_turn({"float32": lambda: sample(None), ROLLOUT: lambda: sample(ROLLOUT)}, rounds)
    return {
        "float32": spread(seconds["float32"]),
        f"{ROLLOUT}, quantizing included": spread(seconds[ROLLOUT]),
        "quantizing": spread(quantizing),
        "times as fast": times_as_fast(seconds["float32"], seconds[ROLLOUT]),
    }


def verdicts(decode: dict[str, dict[str, dict]], picked: str) -> dict[str, bool]:
    """Return whether each promise is kept."""
    at_8 = {name: found["ms"]["median"] for name, found in decode["8"].items()}
    return {
        "int8 at batch 1 decodes at least 4 times as fast as float32": decode["1"][ROLLOUT]["times as fast"]["median"]
        >= 4,
        "the probe picks what is fastest at batch 8 (or within a tenth of it)": at_8[picked]
        <= 1.1 * min(at_8.values()),
    }


def measure(part: str, rounds: int) -> dict:
    """Measure one part of the record."""
    model, tokenizer = large_policy()
    if part == "rollout":
        return {"rollout": rollout_times(model, tokenizer, rounds=2)}
    models = {"float32": model, **{scheme: quantize_model(model, scheme) for scheme in QUANTIZATION_SCHEMES}}
    sizes = {name: stored_bytes(small) for name, small in models.items()}
    sizes[f"{ROLLOUT}, embeddings kept"] = stored_bytes(quantize_model(model, ROLLOUT, embeddings=False))
    with ExitStack() as packing:
        for name in [name for name in ("float32", "bf16") if models[name].dtype in packed_dtypes()]:
            models[f"packed {name}"] = copy.deepcopy(models[name])
            packing.enter_context(packed_weights(models[f"packed {name}"], rows=8, steps=64))
        decode = {str(rows): decode_times(models, rows, rounds) for rows in ROWS}
    config = model.config
    del model, models
    probe = probe_schemes(config, rows=8)
    found = {"rows": 8, "seconds": probe.seconds, "fastest": probe.fastest}
    return {"verdicts": verdicts(decode, probe.fastest), "bytes": sizes, "decode": decode, "probe": found}


def table(record: dict) -> str:
    """Return what was measured of the decode steps, a row for each scheme."""
    decode = record["decode"]
    return markdown(
        [
            {
                "scheme": name,
                "MB": round(record["bytes"][name.removeprefix("packed ")] / 1e6),
                **{f"ms at {rows}": between(decode[rows][name]["ms"], 1) for rows in decode},
                **{f"× float32 at {rows}": between(decode[rows][name]["times as fast"], 1) for rows in decode},
            }
            for name in decode["1"]
        ]
    )


def main() -> int:
    """Measure; exit 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="others keep what is stored")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "quantization_speed.json")
    options = parser.parse_args()
    record = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    for part in options.parts:
        record |= measure(part, options.rounds)
        save(options.output, COMMAND, {name: record[name] for name in RECORDED if name in record})
    if "decode" in record:
        print(table(record))
    return exit_code(record.get("verdicts", {}))


if __name__ == "__main__":
    sys.exit(main())
