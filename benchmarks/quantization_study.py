"""What quantization costs five tiny models in three domains: ``python -m benchmarks.quantization_study``.

The shipped model and four made from it by other training, one of them smaller: GRPO on arithmetic, GRPO on sorting and
coin flips, a hacked reward, and the first four of the six layers, healed by supervised steps.
Each is judged in float32 and in each scheme on the same 1,200 held-out problems (arithmetic 600, sorting 300, coin
flips 300), sampled at temperature 1, with paired 95% intervals against float32. Next to that: bytes, milliseconds of a
decode step, and how far log-probabilities move. Models are kept under ``runs/quantization_study``; each measurement is
written at once to ``benchmarks/results/quantization_study.json``, and a new start continues from there. The report is
written to ``benchmarks/results/quantization_study.md``, its figure to ``docs/images/quantization_study.png``.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from benchmarks.harness import RESULTS, in_turn, markdown, save, spread
from benchmarks.quantization_speed import decode_step
from grpo_edu import (
    LEVELS,
    GRPOConfig,
    accuracy_reward,
    evaluate,
    format_reward,
    generate,
    length_reward,
    load_policy,
    load_problems,
    paired_bootstrap,
    per_token_logps,
    render_prompt,
    save_policy,
    train,
    wilson_interval,
)
from grpo_edu.config import QUANTIZATION_SCHEMES, SupervisedConfig
from grpo_edu.continual.supervised import finetune
from grpo_edu.figures.quantization import interval_table
from grpo_edu.quantization.model import quantize_model, stored_bytes, stored_tensors

COMMAND = "python -m benchmarks.quantization_study"
HERE = Path(__file__).resolve().parent
REPORT, PICTURE = RESULTS / "quantization_study.md", HERE.parent / "docs" / "images" / "quantization_study.png"
FOLDER = HERE.parent / "runs" / "quantization_study"
DOMAINS = {"arithmetic": dict.fromkeys(LEVELS, 200), "sorting": {"sorting": 300}, "coin flips": {"coin_flip": 300}}
ALL = (*LEVELS, "sorting", "coin_flip")
SCHEMES = ("float32", *QUANTIZATION_SCHEMES)
TEMPERATURES = {"sampled": 1.0}
MARGIN = 0.03


def problems_of(names: Sequence[str], split: str, n: int | None = None) -> list:
    """Problems of several sets, `n` of each."""
    return [problem for name in names for problem in load_problems(name, split, n=n)]


def trained(rewards, names: Sequence[str], **settings) -> tuple:
    """Return the shipped model after GRPO."""
    model, tokenizer = load_policy("tiny")
    for _ in train(model, tokenizer, problems_of(names, "train"), rewards, GRPOConfig(**settings)):
        pass
    return model, tokenizer


def taught(steps: int, *, layers: int | None = None) -> tuple:
    """Return the shipped model, or its first layers, after supervised fine-tuning on worked solutions of all sets."""
    model, tokenizer = load_policy("tiny")
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        model.config.layer_types = model.config.layer_types[:layers]
    config = SupervisedConfig(max_steps=steps, prompts_per_step=32, lr_scheduler_type="linear", warmup_steps=10)
    for _ in finetune(model, tokenizer, problems_of(ALL, "train"), config):
        pass
    return model, tokenizer


HACKED = (accuracy_reward, format_reward, functools.partial(length_reward, target=8))
MODELS: dict[str, Callable[[], tuple]] = {
    "shipped": load_policy,
    "GRPO on arithmetic": lambda: trained(accuracy_reward, LEVELS),
    "GRPO on sorting and coins": lambda: trained(accuracy_reward, ("sorting", "coin_flip"), max_steps=30),
    "hacked reward": lambda: trained(HACKED, LEVELS, max_steps=15),
    "four layers, healed": lambda: taught(100, layers=4),
}


def model_of(name: str, folder: Path) -> tuple:
    """A model of the study, trained once and then read from its folder."""
    place = folder / name.replace(" ", "_").replace(",", "")
    if not (place / "config.json").exists():
        save_policy(*MODELS[name](), place, overwrite=True)
    return load_policy(place)


def accuracies(model, tokenizer) -> dict[str, dict[str, str]]:
    """For each temperature and domain, a 1 or 0 for each problem."""
    found: dict[str, dict[str, str]] = {}
    for kind, temperature in TEMPERATURES.items():
        found[kind] = {}
        for domain, sets in DOMAINS.items():
            problems = [problem for name, n in sets.items() for problem in load_problems(name, "heldout", n=n)]
            result = evaluate(model, tokenizer, problems, temperature=temperature, batch_size=400, seed=1)
            found[kind][domain] = "".join(map(str, map(int, result.correct)))
    return found


def file_bytes(model) -> dict[str, int]:
    """Return the bytes of the numbers of a quantized model, as counted and as they lie in its file."""
    content = safetensors.torch.save(stored_tensors(model))
    header = 8 + int.from_bytes(content[:8], "little")
    return {"bytes": stored_bytes(model), "bytes_in_file": len(content) - header}


def mismatch(model: nn.Module, small: nn.Module, tokenizer) -> dict[str, float]:
    """Return how far log-probabilities move, over the tokens that the float32 model samples on 90 held-out problems."""
    names = ("basic", "sorting", "coin_flip")
    prompts = [render_prompt(tokenizer, problem.prompt) for problem in problems_of(names, "heldout", n=30)]
    rollout = generate(
        model,
        tokenizer,
        prompts,
        num_generations=1,
        max_completion_length=96,
        generator=torch.Generator().manual_seed(0),
    )
    batch = rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    with torch.no_grad():
        truth, other = (per_token_logps(side, *batch)[rollout.completion_mask != 0] for side in (model, small))
    difference = other - truth
    return {
        "mean": difference.abs().mean().item(),
        "largest": difference.abs().max().item(),
        "kl": (difference.exp() - difference - 1).mean().item(),  # k3 of KL(float32 ‖ quantized)
    }


def measure(name: str, scheme: str, folder: Path) -> dict:
    """Measure one model in one scheme."""
    model, tokenizer = model_of(name, folder)
    small = model if scheme == "float32" else quantize_model(model, scheme)
    started = time.perf_counter()
    line = {"model": name, "scheme": scheme, "correct": accuracies(small, tokenizer)}
    line["seconds"] = round(time.perf_counter() - started, 1)
    times = {rows: in_turn({"step": decode_step(small, rows)}, 30)["step"] for rows in (1, 8)}
    line["ms"] = {rows: spread([1000 * value for value in found]) for rows, found in times.items()}
    if scheme == "float32":
        return line | {"bytes": stored_bytes(small)}
    return line | file_bytes(small) | {"mismatch": mismatch(model, small, tokenizer)}


def bits(line: dict, kind: str, domain: str | None = None) -> list[int]:
    """Right or wrong, a problem each, of one domain or of all."""
    found = line["correct"][kind]
    return [int(c) for name in (DOMAINS if domain is None else [domain]) for c in found[name]]


def differences(lines: Sequence[dict]) -> list[dict]:
    """Return each model and scheme against the same model in float32, in all domains together and in each."""
    base = {line["model"]: line for line in lines if line["scheme"] == "float32"}
    found = []
    for line in lines:
        if line["scheme"] == "float32":
            continue
        for kind in TEMPERATURES:
            for domain in (None, *DOMAINS):
                change = paired_bootstrap(bits(base[line["model"]], kind, domain), bits(line, kind, domain))
                found.append(
                    {
                        "model": line["model"],
                        "scheme": line["scheme"],
                        "kind": kind,
                        "domain": domain or "all",
                        "n": len(bits(line, kind, domain)),
                        "difference": change.difference,
                        "low": change.low,
                        "high": change.high,
                    }
                )
    return found


def verdicts(lines: Sequence[dict], changes: Sequence[dict]) -> dict[str, bool]:
    """Return what the study may say, judged on every model."""
    judged = {}
    for scheme in QUANTIZATION_SCHEMES:
        own = [c for c in changes if c["scheme"] == scheme and c["domain"] == "all"]
        inside = all(-MARGIN <= c["low"] and c["high"] <= MARGIN for c in own)
        judged[f"{scheme}: within {100 * MARGIN:.0f} points of float32, interval and all, for every model"] = inside
    judged["sizes equal the bytes on disk"] = all(
        line["bytes"] == line["bytes_in_file"] for line in lines if line["scheme"] != "float32"
    )
    return judged


def table(lines: Sequence[dict], changes: Sequence[dict]) -> str:
    """Return a row for each model and scheme."""
    found = {(c["model"], c["scheme"], c["kind"]): c for c in changes if c["domain"] == "all"}
    rows = []
    for line in lines:
        row = {"model": line["model"], "scheme": line["scheme"]}
        for kind in TEMPERATURES:
            solved = bits(line, kind)
            low, high = wilson_interval(sum(solved), len(solved))
            row[f"{kind} (95%)"] = f"{sum(solved) / len(solved):.1%} ({low:.1%} … {high:.1%})"
            c = found.get((line["model"], line["scheme"], kind))
            row[f"{kind}: change, points"] = (
                f"{100 * c['difference']:+.1f} ({100 * c['low']:+.1f} … {100 * c['high']:+.1f})" if c else ""
            )
        row["mean |Δ logp|"] = f"{line['mismatch']['mean']:.4f}" if "mismatch" in line else ""
        row["MB"] = f"{line['bytes'] / 1e6:.2f}"
        row["ms at 1 / 8"] = " / ".join(f"{line['ms'][rows]['median']:.1f}" for rows in ("1", "8"))
        rows.append(row)
    return markdown(rows)


def by_domain(changes: Sequence[dict]) -> str:
    """Return the largest loss of each scheme in each domain, over the models."""
    rows = []
    for scheme in QUANTIZATION_SCHEMES:
        row = {"scheme": scheme}
        for domain in DOMAINS:
            worst = min(
                (c for c in changes if (c["scheme"], c["domain"]) == (scheme, domain)), key=lambda c: c["difference"]
            )
            interval = f"{100 * worst['low']:+.1f} … {100 * worst['high']:+.1f}"
            row[domain] = f"{100 * worst['difference']:+.1f} ({interval}), {worst['model']}, {worst['kind']}"
        rows.append(row)
    return markdown(rows)


def report(lines: Sequence[dict], changes: Sequence[dict], judged: dict[str, bool]) -> str:
    """Return the study as a page."""
    held = [f"- {'**holds**' if holds else '**does not hold**'}: {what}" for what, holds in judged.items()]
    n = sum(sum(sets.values()) for sets in DOMAINS.values())
    return "\n".join(
        [
            "# What quantization costs five tiny models",
            "",
            f"Written by `{COMMAND}`. Every model answers the same {n:,} held-out problems in float32 and in each "
            "scheme, sampled at temperature 1 with the same random numbers; changes are paired, with 95% "
            "bootstrap intervals.",
            "",
            "## What holds, and what does not",
            "",
            *held,
            "",
            "A change whose interval holds 0 is not shown to be a change; one whose interval reaches past the margin "
            "is not shown to be none. The models are small (0.9 to 1.3 million weights) and of one family, so nothing "
            "here is shown of large ones. Their decode steps are bound by Python and not by memory: for speed see "
            "`benchmarks/quantization_speed.py`.",
            "",
            "![Changes of the sampled accuracy of five models in four schemes, with intervals]"
            "(../../docs/images/quantization_study.png)",
            "",
            "## Every model in every scheme",
            "",
            table(lines, changes),
            "",
            "## The worst change in each domain",
            "",
            by_domain(changes),
            "",
        ]
    )


def chosen(changes: Sequence[dict], kind: str = "sampled") -> list[dict]:
    """Return the changes of one kind over all domains, for the figure."""
    return [change for change in changes if change["domain"] == "all" and change["kind"] == kind]


def read_lines(output: Path) -> list[dict]:
    """Return what was measured before, in order."""
    lines = json.loads(output.read_text(encoding="utf-8"))["lines"] if output.exists() else []
    return sorted(lines, key=lambda line: (list(MODELS).index(line["model"]), SCHEMES.index(line["scheme"])))


def main() -> int:
    """Measure what is missing, then write the report."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no measurement after so many")
    parser.add_argument("--models", type=Path, default=FOLDER, help="where the trained models are kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "quantization_study.json")
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    started = time.perf_counter()
    lines = read_lines(options.output)
    done = {(line["model"], line["scheme"]) for line in lines}
    for name in MODELS:
        for scheme in SCHEMES:
            if (name, scheme) in done or time.perf_counter() - started > 60 * options.minutes:
                continue
            lines.append(measure(name, scheme, options.models))
            done.add((name, scheme))
            save(options.output, COMMAND, {"lines": lines})
            print(f"{name}, {scheme}: {lines[-1]['seconds']} s", flush=True)
    if len(done) < len(MODELS) * len(SCHEMES):
        print(f"{len(done)} of {len(MODELS) * len(SCHEMES)} measured: start again to continue")
        return 0
    lines = read_lines(options.output)
    changes = differences(lines)
    judged = verdicts(lines, changes)
    save(options.output, COMMAND, {"verdicts": judged, "changes": changes, "lines": lines})
    options.report.write_text(report(lines, changes, judged), encoding="utf-8")
    picture = interval_table(chosen(changes), margin=MARGIN, title="Sampled accuracy on 1,200 held-out problems")
    picture.savefig(PICTURE, dpi=120)
    print(table(lines, changes))
    for statement, holds in judged.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {statement}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
