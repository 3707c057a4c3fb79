"""Profiles: settings of a run under a name. What is typed next to a profile overrides it.

A profile is a JSON file with fields of `RunConfig` and of `GRPOConfig`, an "about", and perhaps a "base" profile to
start from. Those of the package lie in data/profiles; a file of your own has the same form, and the folder of a run
counts as one, too. This module needs no torch, so that the command line lists and reads profiles at once.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_edu.config import RETIRED, GRPOConfig
from grpo_edu.problems.files import data_dir, read_utf8
from grpo_edu.problems.hub import read_run_config
from grpo_edu.runs.options import CONFIG_FIELDS, OLD_NAMES, RUN_FIELDS, RunConfig, use_current_names
from grpo_edu.runs.record import RunMetadata

PROFILES = tuple(sorted(path.stem for path in (data_dir() / "profiles").glob("*.json")))


@dataclass(frozen=True)
class Profile:
    """Settings under a name.

    name: of `PROFILES`, or a file. about: what it is for.
    settings: fields of `RunConfig` and `GRPOConfig`; a field that is missing has its default.

    Raises ValueError that names the field, and for an unknown one the most similar name.

    >>> Profile("mine", "", {"max_stpes": 3})
    Traceback (most recent call last):
    ...
    ValueError: `max_stpes` is not a setting; do you mean max_steps?
    """

    name: str
    about: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", use_current_names(self.settings))
        known = (*RUN_FIELDS, *CONFIG_FIELDS)
        for name in self.settings:
            if name in RETIRED:
                raise ValueError(f"`{name}` is a setting of grpo_edu 0.3.0 only; leave it out, or use that version.")
            if name not in known:
                raise ValueError(f"`{name}` is not a setting{_nearest(name, known)}")
        self.request()

    def request(self) -> RunConfig:
        """Return the options of this profile's run, with completions long enough for its data."""
        return RunConfig.from_settings(self.settings)

    def config(self) -> GRPOConfig:
        """Return the settings of GRPO in `request`."""
        return self.request().config

    def override(self, settings: Mapping[str, Any]) -> Profile:
        """Return this profile with other settings on top."""
        return Profile(self.name, self.about, {**self.settings, **settings})


def load_profile(name: str | Path = "standard") -> Profile:
    """Load a profile by its name, from a JSON file, or from the folder of a run: what that was trained with.

    Raises ValueError: an unknown name, with the most similar one; a file that is not such JSON, with the line and the
    field; OSError if the file cannot be read.

    >>> load_profile("quick").config().max_steps
    10
    """
    if str(name) in PROFILES:
        return _read_profile(_shipped_file(str(name)), str(name))
    path = Path(name).expanduser()
    if (stored := read_run_config(path)) is not None and "config" in stored:
        run = RunMetadata.from_dict(stored)
        return Profile(str(name), "the settings of a run", {**run.run_config.to_settings(), "model": run.source})
    if not path.is_file():
        known = f"Choose from {', '.join(PROFILES)}, or name a JSON file or the folder of a run"
        raise ValueError(f"`profile`: {str(name)!r} is unknown{_nearest(str(name), PROFILES)} {known}.")
    return _read_profile(path, str(path))


def _read_profile(path: Path, name: str) -> Profile:
    text = read_utf8(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}:{getattr(error, 'lineno', 1)}: this is not valid JSON ({error}); correct this line."
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}:1: a profile must be a JSON object in braces, got {type(content).__name__}.")
    settings = {field: value for field, value in content.items() if field not in ("about", "base")}
    try:
        base = load_profile(content["base"]).settings if "base" in content else {}
        return Profile(name, str(content.get("about", "")), {**base, **settings})
    except ValueError as error:
        raise ValueError(f"{path}:{_line_of(str(error), text)}: {error}") from None
    except (TypeError, AttributeError, OverflowError) as error:  # a number in place of a list, say
        raise ValueError(f"{path}:1: a setting has a value of a wrong kind ({error}); correct it.") from None


def _line_of(message: str, text: str) -> int:
    """Return the line of a JSON text with the field that an error message begins with; 1 if none is found."""
    field = re.match(r"`?(\w+)", message)
    name = "base" if field and field[1] == "profile" else field[1] if field else ""
    names = "|".join([name, *(old for old, new in OLD_NAMES.items() if new == name)])
    found = re.search(rf'^.*"({names})"\s*:', text, re.MULTILINE)
    return text[: found.end()].count("\n") + 1 if found else 1


def profile_text(profile: Profile) -> str:
    """Return every setting of a profile, one per line; a star marks those that the profile sets itself.

    >>> print(profile_text(load_profile("quick")).splitlines()[0])
    quick: A first look: ten steps, evaluated on 100 held-out problems.
    """
    values = profile.request().to_settings()
    width = max(map(len, values))
    lines = [
        f"{'*' if name in profile.settings else ' '} {name:<{width}}  {_shown(value)}" for name, value in values.items()
    ]
    return "\n".join([f"{profile.name}: {profile.about}", *lines])


def profiles_text() -> str:
    """Return the names of all profiles, each with what it is for."""
    width = max(map(len, PROFILES))
    return "\n".join(f"{name:<{width}}  {about}" for name, about in read_abouts().items())


def read_abouts() -> dict[str, str]:
    """Return what each profile is for. Their settings are not checked, because a check of a loss needs torch."""
    return {name: json.loads(read_utf8(_shipped_file(name))).get("about", "") for name in PROFILES}


def _shipped_file(name: str) -> Path:
    return data_dir() / "profiles" / f"{name}.json"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return repr(value) if isinstance(value, str) and "\n" in value else str(value)


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; do you mean {close[0]}?" if close else "."
