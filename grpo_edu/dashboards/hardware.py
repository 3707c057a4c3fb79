"""Live view of this computer: cores, threads, and what uses the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ipywidgets as widgets

from grpo_edu.dashboards.base import Dashboard, button_row, slider
from grpo_edu.dashboards.worker import Stopped, Worker, words_of
from grpo_edu.fast.memory import GIB, resident_bytes
from grpo_edu.figures.machine import stacked_bars
from grpo_edu.machine.hardware import memory_bytes, usable_cores

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
            {"Start": (self._start, "measure again and again"), "Stop": (self._stop, "stop measuring")}
        )
        self.worker: Worker | None = None
        self.looks = 0
        about = "What uses the memory and the cores."
        super().__init__("Hardware monitor", [self.interval, buttons], about)
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
        """The bar of the memory; its alt has no numbers, which differ from machine to machine."""
        figure = stacked_bars({"memory": self.look()}, title="Memory", unit="GiB")
        return figure, "Memory of this process, of other programs, and what is available"

    def refresh(self) -> None:
        """Measure once and show it."""
        import psutil
        import torch

        busy = ", ".join(f"{share:.0f}%" for share in psutil.cpu_percent(percpu=True))
        self.show(*self.draw())
        self.looks += 1
        self.say(
            f"{usable_cores():g} usable cores, busy: {busy}. torch computes with {torch.get_num_threads()} threads; "
            f"this process has {psutil.Process().num_threads()}."
        )

    def close(self) -> None:
        """Stop when the widget is closed."""
        self._stop()
        super().close()

    def _start(self, button: object = None) -> None:
        if self.worker is None or not self.worker.running:
            self.worker = Worker(self._watch, self._ended)
            self.worker.start()

    def _stop(self, button: object = None) -> None:
        if self.worker is not None:
            self.worker.stop()

    def _watch(self, worker: Worker) -> None:
        while True:
            worker.goes_on()
            self.refresh()
            worker.wait(self.interval.value)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Stopped):
            self.say(words_of(error), wrong=True)
