"""The process of one submission: ``python -m classroom.challenger``, started by `classroom.challenge`.

It runs the functions of ``submission.py`` on data that the judge sends, and sends back what they return. The model, the
sampling, the counting of tokens and the held-out problems stay in the judge's process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from classroom.sandbox import Limits
from classroom.student import become, error_line, limit_resources, lines, say
from classroom.values import decode, encode
from grpo_edu.problems.templates import data_dir
from grpo_edu.rewards import accuracy_reward, reward_name

FILE = "submission.py"


class Submission:
    """The names that ``submission.py`` defines, and the functions that the judge may call."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "submission"}
        self.rewards: list[Callable] = [accuracy_reward]
        self.logps = self.losses = torch.zeros(0)

    def load(self, source: str, start: str) -> dict[str, Any]:
        """Run the file; its settings for this starting model, its rewards' names, and the other functions it has."""
        exec(compile(source, FILE, "exec"), self.names)
        self.rewards = list(self.names.get("rewards", self.rewards))
        return {
            "settings": self.names["settings"](start),
            "rewards": [reward_name(function) for function in self.rewards],
            "functions": [name for name in ("advantages", "loss") if name in self.names],
        }

    def reward(self, index: int, columns: dict[str, Any]) -> Any:
        """Return the rewards of one reward function."""
        returned = self.rewards[index](**columns)
        return returned.tolist() if hasattr(returned, "tolist") else returned

    def advantages(self, rewards: Tensor, num_generations: int) -> Any:
        """Return the advantages of a batch."""
        return self.names["advantages"](rewards, num_generations)

    def loss(self, per_token_logps: Tensor, others: tuple, settings: dict[str, Any]) -> Any:
        """Return the losses of a micro-batch; their gradient can be computed afterwards."""
        self.logps = per_token_logps.requires_grad_(True)
        self.losses = self.names["loss"](self.logps, *others, **settings)
        return self.losses

    def gradient(self, upstream: Tensor) -> Tensor:
        """Return the gradient of the last losses with respect to the log-probabilities."""
        return torch.autograd.grad(self.losses, self.logps, upstream)[0]


def report_closed_files(channel: int) -> None:
    """Tell the judge when a file of the models or of the problems is opened.

    In the sandbox these folders are empty, so this is only for a clear message.
    """
    closed = {name: str(data_dir() / name) for name in ("models", "problems")}

    def look(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        for name, folder in closed.items():
            if path.startswith(folder):
                say(channel, closed=name, path=path)
                raise PermissionError(f"{path} is closed to a submission")

    sys.addaudithook(look)


def main() -> int:
    """Answer the judge's requests from stdin until it closes; answers go to the descriptor in the first argument."""
    channel, requests = int(sys.argv[1]), lines(0)
    setup = next(requests)
    torch.set_num_threads(1)
    limit_resources(Limits(**setup["limits"]), setup["others"])
    become(setup["user"])
    os.chdir(os.environ["HOME"])
    report_closed_files(channel)
    say(channel, ready=True)
    submission = Submission()
    for request in requests:
        try:
            value = getattr(submission, request["do"])(**decode(request["arguments"]))
            say(channel, value=encode(value))
        except BaseException as error:  # SystemExit of the submission too: the judge hears of it
            say(channel, error=f"{error_line(error)}{_place(error)}")
    return 0


def _place(error: BaseException) -> str:
    """Return the last line of the submission that the error came through."""
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == FILE]
    return f" (line {numbers[-1]} of {FILE})" if numbers else ""


if __name__ == "__main__":
    raise SystemExit(main())
