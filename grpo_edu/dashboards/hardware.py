"""Live view of this computer: cores, threads, and what uses the memory."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, button_row, offer, slider
from grpo_edu.dashboards.worker import Worker
from grpo_edu.fast.memory import GIB, resident_bytes
from grpo_edu.figures.machine import stacked_bars
from grpo_edu.machine.hardware import memory_bytes, usable_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ALT = "Memory of this process, of other programs, and what is available"


class HardwareMonitor(Dashboard):
    """Cores, threads and the use of memory, measured again and again while the monitor runs.

    Args:
        interval: seconds between two measurements, at least half a second.

    >>> monitor = HardwareMonitor()
    >>> sorted(monitor.look())
    ['available', 'other programs', 'this process and its children']
    """

    def __init__(self, interval: float = 2.0) -> None:
        self.interval = slider(widgets.FloatSlider, "seconds between updates", interval, 0.5, 10.0, 0.5, "")
        (self.start, self.stop), buttons = button_row(
            {"Start": (self._start, "measure again and again"), "Stop": (self.halt, "stop measuring")}
        )
        self._buttons = [self.start, self.stop]
        offer(self._buttons, [self.start], self.start)
        self.looks = 0
        about = "What uses the memory and the cores."
        super().__init__("Hardware monitor", [self.interval, buttons], about)
        self.load = widgets.HTML()  # not in the message, which a screen reader would read after each measurement
        self.stage.children = (self.message, self.load, self.picture)
        self.show(*self.draw())
        self.say(
            "The memory in use now. Press Start to measure it again and again, together with the load of the cores."
        )

    def look(self) -> dict[str, float]:
        """Part → GiB, now; the parts add up to the memory that this process may use."""
        total, available = memory_bytes()
        own = resident_bytes()
        parts = {
            "this process and its children": own,
            "other programs": max(0, total - available - own),
            "available": available,
        }
        return {name: size / GIB for name, size in parts.items()}

    def draw(self) -> tuple[Figure, str]:
        """Draw the bar of the memory; its alt has no numbers, which differ from machine to machine."""
        return _memory_bar(self.look()), _ALT

    def refresh(self) -> None:
        """Measure once and show it."""
        import psutil
        import torch

        busy = ", ".join(f"{share:.0f}%" for share in psutil.cpu_percent(percpu=True))
        parts = self.look()
        self.show(_memory_bar(parts), f"{_ALT}: {', '.join(f'{name} {size:.2f} GiB' for name, size in parts.items())}")
        self.looks += 1
        self.load.value = html.escape(
            f"{usable_cores():g} usable cores, busy: {busy}. torch computes with {torch.get_num_threads()} threads; "
            f"this process has {psutil.Process().num_threads()}."
        )

    def _start(self, button: object = None) -> None:
        if not self.busy:
            offer(self._buttons, [self.stop], self.stop)
            self.say("Memory and load are measured again and again, until you press Stop.")
            self.work(self._watch)

    def ended(self, error: BaseException | None) -> None:
        """Offer to start again."""
        self.say("Stopped. These are the last measurements.")
        super().ended(error)
        offer(self._buttons, [self.start], self.start)

    def _watch(self, worker: Worker) -> None:
        while True:
            worker.goes_on()
            self.refresh()
            worker.wait(self.interval.value)


def _memory_bar(parts: dict[str, float]) -> Figure:
    """Draw the parts of the memory, in GiB, as one bar."""
    return stacked_bars({"memory": parts}, title="Memory", unit="GiB")
