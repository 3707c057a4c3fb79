"""Memory of a run: watch its true peak, notice when an allocation fails, and trade time for memory.

`PeakMemory` measures the peak memory of a process and its children, `return_large_blocks` returns freed memory to the
system (`large_blocks_kept` keeps it during a rollout), `out_of_memory` recognizes failed allocations (torch's are not a
MemoryError), and `recomputed_layers` is gradient checkpointing that also works in eval mode.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from grpo_edu.fast.cores import control_groups, number_in

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30
LARGE_MODEL = 2**28  # bytes of weights from which on freed memory is given back
_RETURNED, _KEPT = (
    2**20,
    2**30,
)  # bytes: the size from which blocks are returned to the system as soon as they are freed
_MALLOPT = {"trim_threshold": -1, "mmap_threshold": -3}  # of glibc's malloc.h

# What torch's CPU allocator says when the system gives it no memory, on Linux and macOS, and on Windows.
_ALLOCATOR_WORDS = ("can't allocate memory", "not enough memory", "out of memory")


_MEMORY_FILES = (  # limit, usage, and the part of memory.stat that is cache and would be given back
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class PeakMemory:
    """A context that measures the peak resident memory of this process and all its children, in bytes.

    A thread measures the memory every `interval` seconds. On Linux and macOS the kernel's own maximum for this process
    is also read at the end, so that a peak between two measurements is not missed. For child processes only private
    memory is counted, because a forked child shares the rest with its parent.

    peak: the largest resident memory while the context was open. start: the resident memory when it was opened.
    The difference of the two is the memory that the code inside needed. It is exact in a new process only, because
    otherwise the code may use memory again that was freed before.

    Args:
        interval: seconds between two measurements.

    >>> with PeakMemory() as memory:
    ...     block = bytearray(50_000_000)
    >>> memory.peak >= memory.start > 1_000_000
    True
    """

    def __init__(self, interval: float = 0.01) -> None:
        if not interval > 0:
            raise ValueError(f"interval must be a positive number of seconds, got {interval}")
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
    """Return freed blocks of at least one mebibyte to the system at once; False if this cannot be set.

    glibc keeps freed blocks of up to 32 MiB in its heap if memory between them is still in use. With 494 million
    parameters, whose gradients are blocks of 17 MiB, updating one weight at a time kept 1.8 GB of unused memory.
    Allocating new pages takes time, which does not matter for a model of this size, but does for a tiny one.
    """
    return _mallopt(mmap_threshold=_RETURNED)


@contextmanager
def large_blocks_kept(model: nn.Module) -> Iterator[None]:
    """A context in which the freed blocks of a large model are used again; what is left of them is returned after it.

    A rollout takes and frees the same few large blocks for every token. If each is returned to the system at once
    (`return_large_blocks`), the system has to clear its pages again and again: with SmolLM2, 64 completions of 24
    tokens cause 480,000 page faults, and 39,000 in this context.
    """
    import ctypes

    size = sum(weight.nbytes for weight in model.parameters())
    if size < LARGE_MODEL or not _mallopt(mmap_threshold=_KEPT, trim_threshold=_KEPT):
        yield
        return
    try:
        yield
    finally:
        _mallopt(mmap_threshold=_RETURNED, trim_threshold=_RETURNED)
        ctypes.CDLL(None).malloc_trim(0)


def _mallopt(**settings: int) -> bool:
    """Set parameters of glibc's allocator; False if one cannot be set, or the C library is another."""
    import ctypes

    try:
        return sys.platform == "linux" and all(
            ctypes.CDLL(None).mallopt(_MALLOPT[name], value) == 1 for name, value in settings.items()
        )
    except (OSError, AttributeError):
        return False


def resident_bytes() -> int:
    """Return the resident memory of this process and the private memory of its children, in bytes."""
    import psutil

    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_full_info().uss
        except psutil.Error:  # it has just ended, or may not be inspected
            continue
    return total


def _high_water_mark() -> int:
    """Return the largest resident memory of this process so far, from the kernel; 0 if it is not available."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would also count what the parent held when it forked
        lines = (line.split() for line in status.read_text().splitlines())
        return next((int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:"), 0)
    if sys.platform != "darwin":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def out_of_memory(error: BaseException) -> bool:
    """Return True if `error` says that memory ran out: Python's MemoryError, or the RuntimeError of torch's allocators.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ALLOCATOR_WORDS)


@contextmanager
def recomputed_layers(model: nn.Module, active: bool = True) -> Iterator[None]:
    """A context with gradient checkpointing: the forward pass keeps only the input of each layer.

    Chen et al. 2016, https://arxiv.org/abs/1604.06174: the backward pass computes the other activations again, one
    layer at a time. Memory therefore holds one tensor per layer and the activations of one layer instead of those of
    all layers, at the cost of a second forward pass. Values and gradients stay the same.

    `model.gradient_checkpointing_enable()` of transformers silently does nothing in eval mode. A GRPO policy is trained
    in eval mode, because with dropout it would not be the policy that sampled; therefore this function wraps the layers
    itself. Only the forward pass must be inside the context.

    Args:
        model: a causal language model of transformers, with or without adapters.
        active: if False, the context does nothing.

    Raises ValueError: the model has no layers that transformers marks as suitable for checkpointing.
    """
    if not active:
        yield
        return
    from torch.utils.checkpoint import checkpoint

    with replaced_forward(
        checkpointed_layers(model), lambda layer: partial(checkpoint, layer.forward, use_reentrant=False)
    ):
        yield


@contextmanager
def replaced_forward(layers: Sequence[nn.Module], make: Callable[[Any], Callable]) -> Iterator[None]:
    """A context in which each layer computes with the function that `make` returns for it."""
    own: list[Callable | None] = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = make(layer)
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                layer.__dict__.pop("forward", None)  # absent where `make` failed before this layer
            else:
                layer.forward = forward


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model` that `recomputed_layers` wraps; raises ValueError if there are none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"model {type(model).__name__} has no layers for gradient checkpointing; set gradient_checkpointing=False"
        )
    return layers


def memory_bytes() -> tuple[int, int]:
    """Return the (total, available) bytes of memory, within a container's limit if there is one."""
    import psutil

    memory = psutil.virtual_memory()
    limit, granted = memory_limit()
    return int(min(memory.total, limit)), int(min(memory.available, granted))


def memory_limit(root: Path = Path("/")) -> tuple[float, float]:
    """(limit, available) bytes that the control groups grant; infinity without a limit."""
    limit = available = math.inf
    for folder in control_groups(root, "memory"):
        for limit_name, usage_name, cache_name in _MEMORY_FILES:
            granted, used = number_in(folder / limit_name), number_in(folder / usage_name)
            if granted is not None:
                in_use = max(0, (used or 0) - _statistic(folder / "memory.stat", cache_name))
                limit, available = min(limit, granted), min(available, max(0, granted - in_use))
    return limit, available


def _statistic(path: Path, name: str) -> int:
    """Return the value of a line such as "inactive_file 4096"; 0 if there is none."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
