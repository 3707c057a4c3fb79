"""How the time of a step grows with G, C, P and the number of parameters: ``python -m benchmarks.growth``.

A random model of the tiny one's shape trains on prompts of P random digits, with stock TRL (`GRPOTrainer` with
transformers' `generate`) and with this package, which take turns. It never stops, so that every completion has C
tokens, and samples from a thousand nearly equally likely tokens, so that completions share nothing but their prompt:
the hardest case for this package, whose savings lie in what is shared. Each sweep changes one number; the others stay
at 4 prompts, G = 8, C = 32, P = 64. Prints tables with the growth's exponent (the slope between the last two points, in
logarithms), draws ``docs/images/growth.png`` and writes ``benchmarks/results/growth.json``. About 4 minutes.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import RESULTS, between, markdown, save, spread, steps_in_turn
from benchmarks.step import STILL
from grpo_edu import GRPOConfig, load_policy, train
from grpo_edu.figures.style import INK, LEGEND, look, panel_grid, style_axes
from grpo_edu.machine.step_process import never_tied
from grpo_edu.problems.templates import Problem
from grpo_edu.scale.trl_backend import train_with_trl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "python -m benchmarks.growth"
PICTURE = RESULTS.parents[1] / "docs" / "images" / "growth.png"
BASE = {"G": 8, "C": 32, "P": 64, "width": 128}
SWEEPS = {"G": (2, 4, 8, 16, 32), "C": (8, 16, 32, 64, 128), "P": (16, 32, 64, 128, 256), "width": (64, 128, 256, 512)}
LABELS = {"G": "completions per prompt, G", "C": "completion tokens, C", "P": "prompt tokens, P", "width": "parameters"}
SIDES = {"stock TRL": partial(train_with_trl, rollout="transformers"), "grpo_edu": train}
PROMPTS = 4
BARE_TEMPLATE = "{{ messages[-1]['content'] }}"


def random_policy(width: int):
    """Return a random model of six layers that cannot stop (width 128: as `tiny`), and a tokenizer for digits."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    _, tokenizer = load_policy("tiny")
    tokenizer.chat_template = BARE_TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=6,
        num_attention_heads=max(2, width // 32),
        num_key_value_heads=max(1, width // 64),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    bias = torch.zeros(len(tokenizer))
    bias[tokenizer.eos_token_id] = -1e4
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model, tokenizer


def digit_problems(length: int) -> list[Problem]:
    """PROMPTS prompts of `length` random digits, a token each.

    >>> [len(problem.prompt) for problem in digit_problems(16)]
    [16, 16, 16, 16]
    """
    rng = random.Random(0)
    return [Problem("".join(rng.choices("0123456789", k=length)), "1", "basic", "#### 1") for _ in range(PROMPTS)]


def start(side: Callable, sizes: Mapping[str, int]) -> Iterator[dict]:
    """Return the steps of a training run of these sizes."""
    config = GRPOConfig(
        prompts_per_step=PROMPTS,
        num_generations=sizes["G"],
        max_completion_length=sizes["C"],
        learning_rate=STILL,
        max_steps=1000,
    )
    return side(*random_policy(sizes["width"]), digit_problems(sizes["P"]), never_tied, config)


def measure(name: str, value: int, rounds: int) -> dict[str, Any]:
    """Measure one point of a sweep: the seconds of a step on each side."""
    sizes = {**BASE, name: value}
    sides = {side: partial(start, function, sizes) for side, function in SIDES.items()}
    steps = steps_in_turn(sides, rounds)
    at = random_policy(value)[0].num_parameters() if name == "width" else value
    return {"at": at, **{side: spread([step["seconds"] for step in found]) for side, found in steps.items()}}


def exponent(points: Sequence[Mapping[str, Any]], side: str) -> float:
    """Return the power with which time grows between the last two points.

    >>> round(exponent([{"at": 2, "x": {"median": 1.0}}, {"at": 4, "x": {"median": 4.0}}], "x"), 6)
    2.0
    """
    before, last = points[-2:]
    return math.log(last[side]["median"] / before[side]["median"]) / math.log(last["at"] / before["at"])


def growth_figure(sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw seconds of a step against each number, both axes in logarithms, a line per side."""
    from matplotlib.ticker import LogLocator

    figure, panels = panel_grid(len(sweeps))
    for axes, (name, points) in zip(panels, sweeps.items(), strict=True):
        style_axes(axes, LABELS[name], "seconds a step", "")
        places = [point["at"] for point in points]
        for number, side in enumerate(SIDES):
            axes.plot(places, [point[side]["median"] for point in points], label=side, **look(number))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        shown = [f"{place / 1e6:.1f}M" if name == "width" else str(place) for place in places]
        axes.set_xticks(places, shown, color=INK)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
    panels[0].legend(**LEGEND)
    return figure


def table(sweeps: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a Markdown table: a row per point, and the exponents in the last row of each sweep."""
    rows = []
    for name, points in sweeps.items():
        for point in points:
            seconds = {side: between(point[side]) for side in SIDES}
            ratio = point["stock TRL"]["median"] / point["grpo_edu"]["median"]
            rows.append({"sweep": LABELS[name], "at": point["at"], **seconds, "times as fast": f"{ratio:.1f}"})
        powers = {side: f"grows with power {exponent(points, side):.2f}" for side in SIDES}
        rows.append({"sweep": LABELS[name], "at": "", **powers, "times as fast": ""})
    return markdown(rows)


def main() -> int:
    """Measure all sweeps, print, draw and store them."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "growth.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    sweeps = {name: [measure(name, value, options.rounds) for value in values] for name, values in SWEEPS.items()}
    powers = {name: {side: exponent(points, side) for side in SIDES} for name, points in sweeps.items()}
    save(options.output, COMMAND, {"base": {**BASE, "prompts": PROMPTS}, "sweeps": sweeps, "exponents": powers})
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    growth_figure(sweeps).savefig(options.picture, dpi=120, bbox_inches="tight")
    print(table(sweeps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
