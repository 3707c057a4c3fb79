"""The command `grpo-edu`: its commands, its exit codes, and its one-line error messages.

Exit codes: 0: done. 1: something failed during the work. 2: input that is not valid; nothing was done. 130: Ctrl-C,
SIGTERM or SIGHUP during a training run.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import shlex
import sys
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from grpo_edu import __version__
from grpo_edu.cli.options import Parser, add_common_options, complain, notes_of, option_names

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# Command → what it does, and the module that has its `add_…_options` and `run_…_command` (which returns the exit code).
# None stands for the package `classroom`, which may not be installed.
COMMANDS = {
    "doctor": ("check whether this computer can run the course", "machine"),
    "train": ("train a policy with GRPO, and evaluate it before and after", "train"),
    "profiles": ("list the profiles of train, or print one", "train"),
    "evaluate": ("measure a policy's accuracy and mean reward on held-out problems", "train"),
    "reward-check": ("test your own reward function before you train with it", "train"),
    "show": ("show completions that a run sampled, with their rewards and advantages", "results"),
    "compare": ("compare two runs: their settings, and what each solves of the same held-out problems", "results"),
    "diagnose": ("say what a run's log shows, and what is probably wrong with the run", "results"),
    "chat": ("ask a trained policy and its base model the same questions", "results"),
    "export": ("write a run's policy as a transformers folder with a model card", "results"),
    "curriculum": ("train on one task after another, and measure forgetting", "studies"),
    "app": ("open the dashboards in a browser", "app"),
    "grade": ("grade a folder of students' exercises in a sandbox", None),
    "challenge": ("try, submit or judge entries to the challenge", None),
    "cluster": ("write a Slurm job for a training run on a cluster", "machine"),
    "sweep": ("search for better settings, and evaluate the best on new seeds", "studies"),
    "bench": ("measure this computer, for a row in docs/measured.md", "machine"),
}


def build_parser(typed: str | None = None) -> ArgumentParser:
    """Return the parser of `grpo-edu`; parsed arguments name the command as `command`.

    typed: the command whose options are needed; None: those of all commands.
    """
    parser = Parser(
        prog="grpo-edu",
        description="GRPO on an ordinary CPU. Begin with: grpo-edu doctor, then grpo-edu train --steps 20",
        epilog="grpo-edu COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"grpo-edu {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (about, module) in COMMANDS.items():
        text = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=text)
        if typed not in (None, name):
            continue
        if found := load_module(module):
            getattr(found, f"add_{name.replace('-', '_')}_options")(command)
        add_common_options(command, json=name != "app")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (those of the process if None); returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the command
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot print µ or ü must not end a run
    typed = argv[0] if argv and argv[0] in COMMANDS else None
    module = load_module(COMMANDS[typed][1]) if typed else None
    if typed and module is None:
        from grpo_edu.cli.classroom import MISSING

        complain(f"error: {typed}: {MISSING}")
        return 2
    parser = build_parser(typed)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    arguments.typed = shlex.join(["grpo-edu", *argv])
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, subparsers(parser)[arguments.command])
            code = getattr(module, f"run_{arguments.command.replace('-', '_')}_command")(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output is gone: end silently, as Unix tools do
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt as error:
        if arguments.debug:
            raise
        complain("interrupted" if notes_of(error) else "interrupted; nothing was saved", error)
        return 130
    except (ValueError, OSError, RuntimeError, ArithmeticError, MemoryError) as error:
        if arguments.debug:
            raise
        message = option_names(_message(error), subparsers(parser)[arguments.command])
        complain(f"error: {message}", error)
        return 1 if _failed_during_work(error) else 2


def subparsers(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parser of each command."""
    return next(action.choices for action in parser._actions if isinstance(action.choices, dict))


def load_module(name: str | None) -> ModuleType | None:
    """Import the module of a command, by its name in `grpo_edu.cli`, or that of the package `classroom`; None: none."""
    if name is None:
        from grpo_edu.cli.classroom import classroom_module

        return classroom_module()
    return importlib.import_module(f"grpo_edu.cli.{name}")


def _show_warning(command: ArgumentParser, message: Warning | str, *where: object) -> None:
    """Print a warning in one line, without the place in the code."""
    complain(f"warning: {option_names(str(message), command)}")


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL and not error.filename:
        return "the disk is full; free some space, then repeat the command"
    if isinstance(error, MemoryError):
        return "out of memory; raise `gradient_accumulation_steps`, or lower `prompts_per_step`"
    return str(error) or type(error).__name__


def _failed_during_work(error: BaseException) -> bool:
    """Return whether the input may be valid: the run had begun (a note says what it keeps), or the disk is full."""
    if isinstance(error, OSError):
        return bool(notes_of(error)) or error.errno in _DISK_FULL
    return bool(notes_of(error)) or not isinstance(error, ValueError)
