"""The edge's sign of life: workers drop the runs of an edge that falls silent."""

from __future__ import annotations

import asyncio
import logging

from schemas.errors import Disconnected
from schemas.state import EdgeBeat
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock

_log = logging.getLogger("headrace.edge")


class Beats:
    def __init__(self, bus: Bus, subjects: Subjects, clock: Clock, every_s: float) -> None:
        self._bus = bus
        self._subject = subjects.edge_state(bus.process)
        self._clock = clock
        self._every_s = every_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(self._every_s)

    def beat(self, *, left: bool = False) -> None:
        process, dialect = self._bus.process, self._bus.dialect
        beat = EdgeBeat(process=process, sent=self._clock.wall(), schemas=dialect.own, writes=dialect.writes, left=left)
        try:
            send(self._bus, self._subject, beat)
        except Disconnected:
            _log.debug("no beat while the bus is down")
