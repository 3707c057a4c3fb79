"""Measure where the time goes between the start of a process and the end of its first training step.

``grpo-edu doctor --startup`` prints the result. `startup_anatomy` measures in a fresh process, in which nothing has
been imported yet; it runs ``python -m grpo_edu.machine.startup``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from grpo_edu import gc_paused

# In this order. What comes after the first step is not start-up: it shows the cost in a process that stays.
PHASES = ("python", "import torch", "import transformers", "problems", "model", "first step")
AFTERWARDS = ("second step", "run again")


def startup_anatomy(model: str | Path = "tiny") -> dict[str, float]:
    """Measure the seconds of each phase in `PHASES` and `AFTERWARDS` once, in a fresh process.

    "python" is the start of the interpreter with this package. "first step" trains on 16 prompts × 8 completions with
    the default settings, and includes the imports that it needs. "run again" restores the loaded weights
    (`models.Session`) and trains for one step.

    Args:
        model: as for `load_policy`.

    Raises:
        RuntimeError: the process failed; the message is the last line of its stderr.
    """
    return measure_process([sys.executable, "-m", "grpo_edu.machine.startup", str(model)])


def measure_process(command: list[str]) -> dict[str, float]:
    """Run a command that takes the time of its start as its last argument, and prints its measurements as JSON.

    Raises:
        RuntimeError: the command failed; the message is the last line of its stderr.
    """
    done = subprocess.run([*command, repr(time.time())], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(f"{' '.join(command[1:])} failed: {said[0] if said else f'exit {done.returncode}'}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def startup_text(seconds: dict[str, float], model: str | Path = "tiny") -> str:
    """Return the phases as a table for a terminal.

    >>> print(startup_text({name: 1.0 for name in PHASES + AFTERWARDS}).splitlines()[-3])
      total                   6.00 s
    """
    total = sum(seconds[name] for name in PHASES)
    lines = [f"From the start of a process to the end of the first step of {model}:"]
    lines += [f"  {name:<20} {seconds[name]:7.2f} s {seconds[name] / total:6.0%}" for name in PHASES]
    lines.append(f"  {'total':<20} {total:7.2f} s")
    lines += [f"  {name:<20} {seconds[name]:7.2f} s  in the process that stays" for name in AFTERWARDS]
    return "\n".join(lines)


def main() -> None:
    """The fresh process, with the arguments of `measure_process`: run the phases and print their seconds."""
    model_name, started = sys.argv[1:]
    seconds, last = {}, float(started)

    def mark(phase: str) -> None:
        nonlocal last
        now = time.time()
        seconds[phase], last = now - last, now

    mark("python")
    with gc_paused():  # as the names of grpo_edu are imported
        import torch  # noqa: F401  to time it

        mark("import torch")
        import transformers.modeling_utils  # noqa: F401  what every model's code imports

    mark("import transformers")
    from grpo_edu.problems.files import load_problems
    from grpo_edu.problems.templates import LEVELS

    problems = load_problems(LEVELS, "train")
    mark("problems")
    from grpo_edu.models import Session

    session = Session(model_name)
    mark("model")
    from grpo_edu.config import GRPOConfig
    from grpo_edu.rewards import accuracy_reward
    from grpo_edu.trainer import train

    setting = problems, accuracy_reward, GRPOConfig()
    steps = train(session.model, session.tokenizer, *setting)
    next(steps)
    mark("first step")
    next(steps)
    mark("second step")
    model, tokenizer = session.reset()
    next(train(model, tokenizer, *setting))
    mark("run again")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
