"""The kernels of the web app: each viewer has one, and there are never more than the server allows."""

from __future__ import annotations

import asyncio
from typing import Any

from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado.web import HTTPError
from traitlets import Int


class LimitedKernels(AsyncMappingKernelManager):
    """Voilà's kernels, up to a number; who comes later is told to try again, before a kernel is started."""

    most_kernels = Int(8, help="kernels at a time").tag(config=True)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._one_at_a_time = asyncio.Lock()

    async def start_kernel(self, *arguments: Any, **settings: Any) -> str:  # type: ignore[override]
        """Start a kernel. Raises HTTPError 503 if all of them are in use."""
        async with self._one_at_a_time:
            if len(self.list_kernel_ids()) >= self.most_kernels:
                raise HTTPError(503, reason=f"{self.most_kernels} viewers are here already; try again later")
            return await super().start_kernel(*arguments, **settings)
