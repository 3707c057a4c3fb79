"""The process that forks a student's: ``python -m grpo_edu.grading.worker``, spoken to in lines of JSON.

It imports torch and the checks once, never runs a student's code itself, and forks a process for each notebook, which
confines itself (`grading_sandbox`) and answers (`grading_student`). A fork takes milliseconds, a fresh interpreter with
torch seconds. nbgrader runs a Jupyter kernel a notebook instead, whose outputs, scores among them, are the student's
to print.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_edu.grading.processes import clear_away, has_ended, processor_time, threads_of_this_user, wait_for_end
from grpo_edu.grading.sandbox import Limits, confine, limit_resources, readable_places, usable_user

_MOST_ANSWERS = 2**24  # bytes that a student's process may send


def main() -> int:
    """Answer tasks from stdin until it closes."""
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    _warm_up()
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None)
        libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a student leaves running comes to us
        libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process of this user may look into this one

    def reply(content: dict[str, Any]) -> None:
        line = json.dumps(content).encode() + b"\n"
        while line:
            line = line[os.write(replies, line) :]

    reply({"ready": True})
    for line in tasks:
        task = json.loads(line)
        own = {"id": task["id"]}

        def say(one: dict[str, Any], own: dict[str, Any] = own) -> None:
            reply({**own, **one})

        reply({**own, **Student(task, say).run()})
    return 0


def _warm_up() -> None:
    """Import what every notebook needs, all exercises among it; start no thread."""
    import IPython.core.interactiveshell  # noqa: F401
    import matplotlib.font_manager  # noqa: F401  its list of fonts takes seconds to make, once
    import torch

    from grpo_edu.checks import exercises

    exercises()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # pages that the collector does not touch stay shared


class Student:
    """One process for one task, watched to its end. tell: called with each message that is of use."""

    def __init__(self, task: dict[str, Any], tell: Callable[[dict], None]) -> None:
        self.task, self.tell = task, tell
        self.limits = Limits(**task["limits"])
        self.folder = Path(task["folder"])
        self.user = usable_user(self.folder.parent)
        self.printed, self.output, self.sent, self.rest = 0, b"", 0, b""

    def run(self) -> dict[str, Any]:
        """Fork, watch, clear away; how it ended."""
        self.folder.mkdir(mode=0o700)
        if self.user is not None:
            os.chown(self.folder, self.user.number, self.user.number)
        others = 0 if self.user is not None else threads_of_this_user()
        output, output_end = os.pipe()
        channel, channel_end = os.pipe()
        started = time.monotonic()
        process = os.fork()
        if process == 0:
            self._be_the_student(output_end, channel_end, others)
        os.close(output_end)
        os.close(channel_end)
        used = 0.0
        try:
            how = self._watch(process, output, channel, started)
            used = max(processor_time(process), (time.monotonic() - started) / self.limits.patience)
        finally:
            status = clear_away(process, self.user)
            os.close(output)
            os.close(channel)
            shutil.rmtree(self.folder, ignore_errors=True)
        code = os.waitstatus_to_exitcode(status) if status is not None else None
        return {
            "end": how,
            "code": code,
            "seconds": used,
            "printed": self.printed,
            "output": self.output.decode("utf-8", "replace"),
        }

    def _be_the_student(self, output: int, channel: int, others: int) -> None:
        """The forked process; does not return."""
        code = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(output, number)
            os.dup2(channel, 3)
            os.closerange(4, 1024)
            _own_surroundings(self.folder)
            # Limits first: they count for whoever this process becomes. Then what cannot be taken back.
            limit_resources(self.limits, others)
            held = confine(self.folder, readable_places(), self.user)
            if sys.platform.startswith("linux"):
                libc = ctypes.CDLL(None)
                libc.prctl(4, 1, 0, 0, 0)  # may look at itself again
                libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: not without its watcher
            os.write(3, json.dumps({"protections": held}).encode() + b"\n")
            from grpo_edu.grading.student import run_steps

            run_steps(self.task, 3)
            os.write(3, b'{"done": true}\n')
            code = 0
        except BaseException:  # whatever it is goes to the output, and no further: this is a copy of the worker
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
            os._exit(code)

    def _watch(self, process: int, output: int, channel: int, started: float) -> str:
        """Pass messages on until it is done, dead or late."""
        limits, begun, spent = self.limits, started, 0.0
        open_ends, done = {output, channel}, False
        while True:
            if done:
                return "done"
            if channel not in open_ends:  # closed by its end, which shows a moment later, or by the student
                wait_for_end(process, limits.grace)
                return "ended"
            now, used = time.monotonic(), processor_time(process)
            if max(used, (now - started) / limits.patience) > limits.total_seconds:
                return "total time"
            if max(used - spent, (now - begun) / limits.patience) > limits.seconds + limits.grace:
                return "time"
            ready, _, _ = select.select([*open_ends], [], [], 0.25)
            if not ready and has_ended(process):
                return "ended"
            for end in ready:
                content = os.read(end, 65536)
                if not content:
                    open_ends.discard(end)
                elif end == output:
                    self.printed += len(content)
                    self.output += content[: max(0, limits.output - len(self.output))]
                else:
                    for message in self._messages(content):
                        if message is None:
                            return "garbled"
                        if "at" in message:
                            begun, spent = time.monotonic(), processor_time(process)
                        done = done or message.get("done") is True
                        self.tell({"message": message})

    def _messages(self, content: bytes) -> list[dict | None]:
        """The whole lines of what has come; None for what is no message."""
        self.sent += len(content)
        if self.sent > _MOST_ANSWERS:
            return [None]
        *lines, self.rest = (self.rest + content).split(b"\n")
        found: list[dict | None] = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            found.append(message if isinstance(message, dict) else None)
        return found


def _own_surroundings(folder: Path) -> None:
    os.chdir(folder)
    for name in ("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "XDG_CACHE_HOME", "HF_HOME"):
        os.environ[name] = str(folder)
    os.environ["USER"] = os.environ["LOGNAME"] = "student"
    os.environ.pop("PYTHONPATH", None)


if __name__ == "__main__":
    raise SystemExit(main())
