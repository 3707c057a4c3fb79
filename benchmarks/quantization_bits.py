"""The positive control of the quantization study: ``python -m benchmarks.quantization_bits``.

The claim that 8 and 4 bits cost nothing is worth something only if the same measurement can show a loss. So the
matrices of the model `tiny`, its embedding among them, are rounded to 8, 4, 3 and 2 bits with one scale per tensor, per
row and per group of 32, and the rounded model answers the same 300 held-out problems greedily. Symmetric grids, float32
arithmetic; nothing is trained or chosen. Writes ``benchmarks/results/quantization_bits.json`` in about two minutes.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.harness import RESULTS, markdown, save
from grpo_edu import LEVELS, evaluate, load_policy, load_problems, mcnemar, paired_bootstrap
from grpo_edu.quantization.numbers import quantize

COMMAND = "python -m benchmarks.quantization_bits"
BITS = (8, 4, 3, 2)
SCALES: dict[str, dict[str, Any]] = {"per tensor": {}, "per row": {"dim": 0}, "per group of 32": {"group_size": 32}}


def rounded(bits: int, scale: str) -> tuple:
    """Return the shipped model with every matrix rounded to a grid, and its tokenizer."""
    model, tokenizer = load_policy("tiny")
    with torch.no_grad():
        for weight in model.parameters():  # the tied embedding is one parameter
            if weight.ndim == 2:
                weight.copy_(quantize(weight, bits=bits, **SCALES[scale]).dequantize())
    return model, tokenizer


def outcomes(policy: tuple) -> list[bool]:
    """Return which of the 300 held-out problems are solved greedily."""
    problems = load_problems(LEVELS, "heldout", n=100)
    return evaluate(*policy, problems, temperature=0, batch_size=100).correct


def line(bits: int, scale: str, before: list[bool]) -> dict[str, Any]:
    """Compare one rounded model with float32 on the same problems."""
    after = outcomes(rounded(bits, scale))
    change = paired_bootstrap(before, after)
    found = {"bits": bits, "scale": scale, "k": sum(after), "n": len(after), "accuracy": sum(after) / len(after)}
    return found | {"change": vars(change), "p_value": mcnemar(before, after).p_value}


def table(before: list[bool], lines: list[dict[str, Any]]) -> str:
    """Problems solved: one row for each number of bits."""
    solved = {(row["bits"], row["scale"]): row["k"] for row in lines}
    rows = [{"bits": "32 (float)", **dict.fromkeys(SCALES, sum(before))}]
    return markdown(rows + [{"bits": bits, **{scale: solved[bits, scale] for scale in SCALES}} for bits in BITS])


def main() -> int:
    """Measure, print the table and store the result."""
    before = outcomes(load_policy("tiny"))
    lines = [line(bits, scale, before) for bits in BITS for scale in SCALES]
    save(RESULTS / "quantization_bits.json", COMMAND, {"float32": {"k": sum(before), "n": len(before)}, "lines": lines})
    print(table(before, lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
