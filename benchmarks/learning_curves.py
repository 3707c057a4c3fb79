"""Do both trainers learn alike? ``python -m benchmarks.learning_curves``.

The default run of the tiny model, on five seeds, with this package's trainer and with stock TRL (`GRPOTrainer`,
transformers' `generate`), which take turns. Seeds mean different problems and samples to the two, so their curves can
agree only as samples of one distribution do: the mean reward over each window of steps, with its 95% interval over the
seeds (Student's t), and held-out accuracy at the end. The differences are judged by Welch's t. Prints a table, draws
``docs/images/learning_curves.png`` and writes ``benchmarks/results/learning_curves.json``. About 8 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import RESULTS, exit_code, markdown, save
from grpo_edu import GRPOConfig, accuracy_reward, evaluate, load_policy, load_problems, train
from grpo_edu.figures.style import LEGEND, look, panel_grid, style_axes
from grpo_edu.problems.templates import LEVELS
from grpo_edu.runs.loading import load_split
from grpo_edu.scale.trl_backend import train_with_trl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMMAND = "python -m benchmarks.learning_curves"
PICTURE = RESULTS.parents[1] / "docs" / "images" / "learning_curves.png"
SIDES = {"stock TRL": lambda *setting: train_with_trl(*setting, rollout="transformers"), "grpo_edu": train}
WINDOW = 8  # steps


def run(side: str, config: GRPOConfig, num_heldout: int) -> dict[str, Any]:
    """Train once; return the reward of each step, and the number of held-out problems solved before and after."""
    model, tokenizer = load_policy("tiny")
    heldout = load_split(LEVELS, n=num_heldout)
    setting = {"max_completion_length": config.max_completion_length, "seed": config.seed}
    before = evaluate(model, tokenizer, heldout, **setting)
    history = list(SIDES[side](model, tokenizer, load_problems(LEVELS, "train"), accuracy_reward, config))
    after = evaluate(model, tokenizer, heldout, **setting)
    return {
        "seed": config.seed,
        "reward": [step["reward"] for step in history],
        "seconds": sum(step["step_time"] for step in history),
        "before": before.k,
        "after": after.k,
        "n": after.n,
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and 95% interval of a mean over seeds, Student's t.

    >>> {name: round(value, 3) for name, value in interval([0.4, 0.5, 0.6]).items()}
    {'mean': 0.5, 'low': 0.252, 'high': 0.748}
    """
    from scipy.stats import t

    mean = statistics.mean(values)
    reach = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def windows(rewards: Sequence[float], size: int = WINDOW) -> list[float]:
    """Means of `size` steps each; what does not fill a window at the end is left out.

    >>> windows([0.0, 1.0, 1.0, 1.0, 9.0], 2)
    [0.5, 1.0]
    """
    return [statistics.mean(rewards[start : start + size]) for start in range(0, len(rewards) - size + 1, size)]


def curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, float]]]:
    """Return the interval of each window of each side."""
    return {
        side: [interval(column) for column in zip(*(windows(run["reward"]) for run in found), strict=True)]
        for side, found in runs.items()
    }


def differences(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, float]]:
    """grpo_edu minus stock TRL with Welch's interval: the mean reward of each window, then the accuracy at the end."""
    columns = [list(zip(*(windows(run["reward"]) for run in runs[side]), strict=True)) for side in reversed(SIDES)]
    accuracy = [[run["after"] / run["n"] for run in runs[side]] for side in reversed(SIDES)]
    return [difference(*pair) for pair in [*zip(*columns, strict=True), accuracy]]


def verdicts(found: Sequence[Mapping[str, float]]) -> dict[str, bool]:
    """Return whether the two could be samples of one distribution, window by window, and at the end.

    Judged by the interval of the difference of the means (Welch's t). That each mean lies within the other's interval
    is too much to ask: of two means from one distribution, one in six does not.
    """
    *of_windows, at_the_end = (row["low"] <= 0 <= row["high"] for row in found)
    return {
        "in every window the difference of the mean rewards has 0 in its interval": all(of_windows),
        "the difference of the mean accuracies at the end has 0 in its interval": at_the_end,
    }


def difference(one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Return the difference of two means, with Welch's 95% interval.

    >>> {name: round(value, 3) for name, value in difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]).items()}
    {'value': 1.0, 'low': -1.267, 'high': 3.267}
    """
    from scipy.stats import ttest_ind

    found = ttest_ind(one, other, equal_var=False).confidence_interval()
    value = statistics.mean(one) - statistics.mean(other)
    return {"value": value, "low": float(found.low), "high": float(found.high)}


def curves_figure(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Mean reward by windows of steps with its interval, a band a side."""
    figure, (axes,) = panel_grid(1)
    style_axes(axes, "Reward while training, five seeds", "mean reward", "step")
    for number, (side, points) in enumerate(found.items()):
        steps = [WINDOW * (place + 0.5) for place in range(len(points))]
        axes.plot(steps, [point["mean"] for point in points], label=side, **look(number))
        low, high = ([point[end] for point in points] for end in ("low", "high"))
        axes.fill_between(steps, low, high, color=look(number)["color"], alpha=0.2, linewidth=0)
    axes.legend(loc="lower right", **LEGEND)
    return figure


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a row per window, and the accuracy at the end."""
    shown = {side: [_text(point) for point in points] for side, points in curves(runs).items()}
    names = [f"reward, steps {WINDOW * place + 1}–{WINDOW * (place + 1)}" for place in range(len(shown["grpo_edu"]))]
    rows = [{"": name, **{side: cells[place] for side, cells in shown.items()}} for place, name in enumerate(names)]
    ends = {side: _text(interval([run["after"] / run["n"] for run in found])) for side, found in runs.items()}
    seconds = {side: f"{statistics.mean(run['seconds'] for run in found):.1f} s" for side, found in runs.items()}
    return markdown([*rows, {"": "held-out accuracy after", **ends}, {"": "training", **seconds}])


def _text(point: Mapping[str, float]) -> str:
    return f"{point['mean']:.3f} ({point['low']:.3f} … {point['high']:.3f})"


def main() -> int:
    """Run all seeds; exit 1 if the two sides differ."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--heldout", type=int, default=300)
    parser.add_argument("--output", type=Path, default=RESULTS / "learning_curves.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--add", action="store_true", help="keep the stored seeds (--seeds alone: no others)")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    if options.add:
        runs = json.loads(options.output.read_text(encoding="utf-8"))["runs"]
    for seed in options.seeds:
        for side in SIDES:
            runs[side].append(run(side, GRPOConfig(seed=seed, max_steps=options.steps), options.heldout))
            last = runs[side][-1]
            print(f"{side}, seed {seed}: {last['before']} → {last['after']} of {last['n']}", flush=True)
    for ran in runs.values():
        ran.sort(key=lambda run: run["seed"])
    found = differences(runs)
    judged = verdicts(found)
    save(options.output, COMMAND, {"runs": runs, "curves": curves(runs), "differences": found, "verdicts": judged})
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    curves_figure(curves(runs)).savefig(options.picture, dpi=120)
    print(table(runs))
    for row in found:
        print(f"grpo_edu minus stock TRL {row['value']:+.3f} ({row['low']:+.3f} … {row['high']:+.3f})")
    return exit_code(judged)


if __name__ == "__main__":
    raise SystemExit(main())
