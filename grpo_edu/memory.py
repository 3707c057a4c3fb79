"""Memory of a run: watch its true peak, notice when an allocation fails, and trade time for memory.

Four things that are easily got wrong, each with its reason beside it: `PeakMemory` (a peak between two looks, and the
memory of child processes), `return_large_blocks` (memory that is free and not given back), `out_of_memory` (a failed
allocation of torch's is no MemoryError), and `recomputed_layers` (gradient checkpointing that is switched on and does
nothing).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
LARGE_MODEL = 2**28  # bytes of weights from which on freed memory is given back

# What torch's CPU allocator says when the system gives it no memory, on Linux and macOS, and on Windows.
_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory")


class PeakMemory:
    """A context that measures the peak resident memory of this process and all its children, in bytes.

    A thread looks every `interval` seconds. On Linux and macOS the kernel's own high-water mark of this process is read
    at the end as well, so that a peak between two looks is not missed. Of a child only its private memory is counted,
    since a forked child shares the rest with its parent.

    peak: the most that was resident while the context was open. start: what was resident when it was opened.
    The difference of the two is what the code inside needed. Memory that was freed before may be used again without
    the system noticing, so the difference is exact in a fresh process only.

    Args:
        interval: seconds between two looks.

    >>> with PeakMemory() as memory:
    ...     block = bytearray(50_000_000)
    >>> memory.peak >= memory.start > 1_000_000
    True
    """

    def __init__(self, interval: float = 0.01) -> None:
        if not interval > 0:
            raise ValueError(f"interval: {interval} must be a positive number of seconds")
        self.interval = interval
        self.start = self.peak = 0

    def __enter__(self) -> Self:
        self._mark = _high_water_mark()
        self.start = self.peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="PeakMemory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        mark = _high_water_mark()
        self.peak = max(self.peak, resident_bytes(), mark if mark > self._mark else 0)

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self.peak = max(self.peak, resident_bytes())


def return_large_blocks() -> bool:
    """Let freed memory go back to the system at once, in blocks of a mebibyte and more; False where that is not to set.

    glibc keeps freed blocks of up to 32 MiB in its heap, where what is still in use between them holds them: at 494M
    parameters, whose gradients are blocks of 17 MiB, one that trains them singly kept 1.8 GB that nobody used.
    Fresh pages cost time, which does not show beside products of this size; for a tiny model it does.
    """
    import ctypes

    mmap_threshold = -3  # M_MMAP_THRESHOLD of glibc's malloc.h
    try:
        return sys.platform == "linux" and ctypes.CDLL(None).mallopt(mmap_threshold, 2**20) == 1
    except (OSError, AttributeError):  # another C library
        return False


def resident_bytes() -> int:
    """Bytes of memory that this process holds now, and the private ones of its children."""
    import psutil

    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_full_info().uss
        except psutil.Error:  # it has just ended, or is not ours to look at
            continue
    return total


def _high_water_mark() -> int:
    """The most memory that this process ever held, as the kernel counts it; 0 where that is not told."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count what the parent held when it forked
        lines = (line.split() for line in status.read_text().splitlines())
        return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), 0)
    if sys.platform != "darwin":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: Python's MemoryError, or the RuntimeError of torch's CPU allocator.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)


@contextmanager
def recomputed_layers(model: nn.Module, active: bool = True) -> Iterator[None]:
    """A context in which the forward pass keeps only what enters each layer; the backward pass computes the rest again.

    Gradient checkpointing, Chen et al. 2016, https://arxiv.org/abs/1604.06174: memory of activations falls from all
    that L layers make to one tensor a layer and all of one layer; the price is a second forward pass. Values and
    gradients stay the same.

    `model.gradient_checkpointing_enable()` of transformers acts in training mode alone, without a word. A GRPO policy
    is in eval mode while it learns (dropout would make it another policy than the one that sampled), so here each
    layer is wrapped itself. Only the forward pass needs to stand inside the context.

    Args:
        model: a causal language model of transformers, with adapters or without.
        active: False makes the context do nothing.

    Raises:
        ValueError: the model has no layers that transformers marks as fit for this.
    """
    if not active:
        yield
        return
    from torch.utils.checkpoint import checkpoint

    layers = checkpointed_layers(model)
    own: list[Callable | None] = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of `model` that `recomputed_layers` wraps; raises ValueError where there are none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no layers for gradient checkpointing; set gradient_checkpointing=False"
        )
    return layers
