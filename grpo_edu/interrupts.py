"""Ctrl-C between two steps of a training, never inside one."""

from __future__ import annotations

import signal
import threading

from torch.optim.optimizer import register_optimizer_step_pre_hook


class WholeSteps:
    """A context for a training loop in which Ctrl-C never leaves the weights in the middle of a step.

    While a step samples and computes gradients, the weights are still those of the last full step: Ctrl-C is
    a KeyboardInterrupt at once. From the first optimizer update of a step on, it waits for `done()`.

    >>> with WholeSteps() as steps:
    ...     for _ in range(3):
    ...         steps.done()  # after each step
    """

    def __enter__(self) -> WholeSteps:
        self._updating = self._asked = False
        self._hook = register_optimizer_step_pre_hook(self._on_update)
        self._usual = signal.getsignal(signal.SIGINT)
        # Only the main thread may set a handler, and a process in the background may have to ignore Ctrl-C.
        in_main = threading.current_thread() is threading.main_thread()
        self._installed = in_main and callable(self._usual)
        if self._installed:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._usual)
        self._hook.remove()

    def done(self) -> None:
        """Say that a step is complete; raises KeyboardInterrupt where Ctrl-C waits for it."""
        self._updating = False
        if self._asked:
            raise KeyboardInterrupt

    def _on_update(self, *arguments: object) -> None:
        self._updating = True

    def _on_signal(self, *arguments: object) -> None:
        if not self._updating:
            raise KeyboardInterrupt
        self._asked = True
