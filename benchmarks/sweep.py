"""Two small sweeps on the tiny model: ``python -m benchmarks.sweep``, the example behind ``grpo-edu sweep``.

*rate*: the learning rate and the size of a group. *loss*: the loss and the scaling of rewards, all combinations. Runs
of 12 steps, three seeds a setting, five new seeds to judge. It takes about five minutes of one core; the same command
continues where it was stopped. Writes ``benchmarks/results/sweep.json`` with the line of `grpo-edu sweep` for each.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from benchmarks.harness import RESULTS, save
from grpo_edu.cli.main import build_parser
from grpo_edu.cli.studies import asked_sweep
from grpo_edu.studies.sweep import sweep_text
from grpo_edu.studies.sweep_runs import resume_sweep, start_sweep

COMMAND = "python -m benchmarks.sweep"
_COMMON = "--steps 12 --n 300 --seeds 0,1,2 --judge-seeds 5 --validation 150"
SWEEPS = {
    "rate": f"sweep --learning-rate 3e-5:1e-3 --num-generations 4,8,16 --trials 5 {_COMMON}",
    "loss": f"sweep --loss-type grpo,dapo,dr_grpo --scale-rewards group,none --trials 6 {_COMMON}",
}


def main() -> None:
    """Run what is missing of the sweeps, print what they found, and keep it."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the sweeps are kept (default: runs)")
    parser.add_argument("--output", type=Path, default=RESULTS / "sweep.json")
    options = parser.parse_args()
    record = {}
    for name, line in SWEEPS.items():
        folder = options.folder / f"sweep-{name}"
        if (folder / "config.json").is_file():
            result = resume_sweep(folder)
        else:
            profile, plan = asked_sweep(build_parser().parse_args(shlex.split(line)))
            result = start_sweep(profile, plan, output=folder, command=f"grpo-edu {line}")
        print(f"## {name}\n\n{sweep_text(result)}\n", flush=True)
        found = result.to_dict()
        del found["output"]
        record[name] = {"command": f"grpo-edu {line}", **found}
    save(options.output, COMMAND, record)


if __name__ == "__main__":
    main()
