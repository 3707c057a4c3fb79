"""Rerun the studies of benchmarks/studies, one after the other: ``python -m benchmarks.studies``.

Every study continues from the runs that its ``.jsonl`` file in ``benchmarks/results`` holds; ``--fresh`` moves these
files away first (``NAME.jsonl.old``), so that every run is made again. ``--minutes 30`` gives each study at most 30
minutes; the same command continues.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.harness import RESULTS

COMMAND = "python -m benchmarks.studies"
RESUMABLE = (
    "skill",
    "forgetting",
    "razor",
    "choices",
    "spurious",
    "entropy_collapse",
    "tool_rollouts",
    "other_policy",
    "real_model",
    "real_model_baselines",
    "word_game",
    "gsm8k",
)
STUDIES = (*RESUMABLE, "quantization_bits")


def main() -> int:
    """Run every study in a process of its own; exit 1 if one of them fails or a statement of it does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(STUDIES)}; by default all")
    parser.add_argument("--fresh", action="store_true", help="make every run again")
    parser.add_argument("--minutes", help="for each study, start no new run after so many")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in STUDIES]
    if unknown:
        parser.error(f"there is no study {unknown[0]!r}; use {', '.join(STUDIES)}")
    failed = []
    for name in options.names or STUDIES:
        ledger = RESULTS / f"{name}.jsonl"
        if options.fresh and ledger.exists():
            ledger.rename(ledger.with_suffix(".jsonl.old"))
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if options.minutes and name in RESUMABLE:
            command += ["--minutes", options.minutes]
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all studies are done")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
