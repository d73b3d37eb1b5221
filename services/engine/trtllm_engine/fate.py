"""How a TensorRT-LLM engine ends by itself: broken, so that it computes nothing any more, or worn, so that it must be replaced.

Invariant: the first end counts, and whoever joined hears of it.
"""

from __future__ import annotations

import asyncio
import logging

from services.engine.protocol import EngineWorn

_log = logging.getLogger(__name__)


class Fate:
    """`broken`: what it died of."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[None] | None = None
        self.broken: BaseException | None = None

    def begin(self) -> None:
        """On the loop of those who join."""
        self._ended = asyncio.get_running_loop().create_future()

    async def join(self) -> None:
        """Raises what the engine ended of. Returns at once before it began."""
        if self._ended is not None:
            await asyncio.shield(self._ended)

    def wear(self, error: EngineWorn) -> None:
        """It goes on, but not for long."""
        if self._ended is not None and not self._ended.done():
            _log.error("%s; this worker will be replaced", error.message)
            self._ended.set_exception(error)

    def fault(self, error: Exception) -> None:
        """Anything but a failed request: the engine has shut itself down."""
        if self.broken is None:
            self.broken = error
            _log.critical("the engine ended; this worker computes nothing any more", exc_info=error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
