"""Load a reward function from a file of the user."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from grpo_edu.rewards import OF_TRL, RewardFunction, reward_name


def load_reward(spec: str) -> RewardFunction:
    """Load a reward function of your own, named as FILE.py:function or package.module:function.

    Raises ValueError, or FileNotFoundError, that says what is wrong with the file, the name or the function.
    """
    place, _, name = spec.rpartition(":")
    module = _load_module(place, spec)
    function = getattr(module, name, None)
    if not callable(function) or isinstance(function, type):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise ValueError(f"`reward_funcs`: {name!r} {what} in {place}; it defines {', '.join(own) or 'nothing'}.")
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(
            f"`reward_funcs`: {spec} does not take what every reward is called with; write def {name}(completions, "
            "**kwargs), with the columns that it reads, such as answer, before **kwargs."
        )
    return function


def check_columns(reward_func: RewardFunction, columns: Sequence[str], backend: str = "grpo_edu") -> None:
    """Raise ValueError if a reward function requires a column that the problems or the trainer do not have."""
    known = ("prompts", "completions", "completion_ids", *columns, *(OF_TRL if backend == "trl" else ()))
    for parameter in inspect.signature(reward_func).parameters.values():
        optional = parameter.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        if not optional and parameter.default is inspect.Parameter.empty and parameter.name not in known:
            if parameter.name in OF_TRL:
                raise ValueError(
                    f"`reward_funcs`: {reward_name(reward_func)} requires {parameter.name!r}, which only TRL's trainer "
                    "supplies; train with `backend` trl, or give the parameter a default."
                )
            raise ValueError(
                f"`reward_funcs`: {reward_name(reward_func)} requires the column {parameter.name!r}, which the "
                f"problems lack; they have {', '.join(columns)}."
            )


@contextmanager
def _modules_next_to(file: Path) -> Iterator[None]:
    """A context in which modules next to a file are found first, as Python does for a script.

    Afterwards they are found last, so that imports inside of a function work and none replaces an installed package.
    """
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        if folder not in sys.path:
            sys.path.append(folder)


def _load_module(place: str, spec: str) -> ModuleType:
    """Import a file, or a module by its name."""
    path = Path(place).expanduser()
    try:
        if path.suffix != ".py":
            return importlib.import_module(place)
        if not path.is_file():
            raise FileNotFoundError(f"`reward_funcs`: file {place} does not exist. Check the path in {spec}.")
        found = importlib.util.spec_from_file_location(f"grpo_edu_reward_{path.stem}", path.resolve())
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module  # where dataclasses and pickle look for it
        with _modules_next_to(path):
            found.loader.exec_module(module)
        return module
    except FileNotFoundError:
        raise
    except SyntaxError as error:
        raise ValueError(f"`reward_funcs`: {error.filename}:{error.lineno}: {error.msg}; correct this line.") from None
    except (Exception, SystemExit) as error:  # whatever the code of its author does
        missing = isinstance(error, ModuleNotFoundError) and path.suffix != ".py"
        advice = (
            f"for a file write {place}.py:{spec.rpartition(':')[2]}" if missing else "run it with Python alone first"
        )
        raise ValueError(
            f"`reward_funcs`: importing {place} raised {type(error).__name__}: {error}; {advice}."
        ) from error
