"""Load torch and transformers a fifth sooner: the garbage collector waits until they are there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_MANY_MODULES = 300


@contextmanager
def collector_paused() -> Iterator[None]:
    """For imports: no garbage collection inside; whether it runs afterwards is as it was before.

    An import of torch or transformers makes half a million objects that stay. Python's collector looks through them
    again and again as their number grows, which is a fifth of the time that the imports take. Where many modules came,
    what is there at the end is set aside (`gc.freeze`), so that later collections need not look at it either.

    >>> with collector_paused():
    ...     gc.isenabled()
    False
    >>> gc.isenabled()
    True
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > _MANY_MODULES:
            gc.freeze()
        if enabled:
            gc.enable()
