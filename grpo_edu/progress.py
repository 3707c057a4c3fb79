"""Progress of what takes long: bars in a notebook or a terminal, and elsewhere, as in a log file, lines."""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager, suppress
from typing import Any

LINE_SECONDS = 30.0  # between two lines
_LINE = "{desc}: {n_fmt} of {total_fmt} [{elapsed}<{remaining}{postfix}]"


class ProgressBars(AbstractContextManager):
    """Progress bars, one after the other, in a notebook or a terminal; elsewhere a line every half minute."""

    def __init__(self, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._bar: Any = None
        self._name = ""
        self._started = self._last_line = time.monotonic()

    def show(self, name: str, done: int, total: int, **numbers: str) -> None:
        """Show how much is done of something; another name begins another bar."""
        from tqdm.auto import tqdm

        if name != self._name or self._bar is None or done < self._bar.n:
            self.__exit__()
            # disable=None: tqdm shows nothing if the output is neither a terminal nor a notebook
            self._bar = tqdm(total=total, initial=done, desc=name, disable=None if self._is_shown else True)
            self._name, self._started = name, time.monotonic()
        if numbers:
            self._bar.set_postfix(numbers, refresh=False)
        with suppress(OSError):  # the terminal may have been closed
            self._bar.update(done - self._bar.n)
            if self._is_shown and self._bar.disable:
                self._print_line(done, total, numbers)

    def _print_line(self, done: int, total: int, numbers: dict[str, str]) -> None:
        """Print the progress, unless a line was printed within the last half minute."""
        now = time.monotonic()
        if now - self._last_line < LINE_SECONDS:
            return
        self._last_line = now
        line = self._bar.format_meter(
            done,
            total,
            now - self._started,
            prefix=self._name,
            initial=self._bar.n,
            bar_format=_LINE,
            postfix=", ".join(f"{name}={value}" for name, value in numbers.items()),
        )
        print(line, file=sys.stderr, flush=True)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
