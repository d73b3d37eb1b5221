"""Room that decode workers keep for runs which this worker still computes: renewed in one message a peer, released at the end.

Owns nothing: the run table says what is reserved where. A lost message costs a renewal (the lease is four of them long); a lost
release costs 2 s of room.
"""

from __future__ import annotations

import asyncio

from schemas.errors import BusError
from schemas.placement import Lease, LeaseItem, LeaseVerb
from services.bus.typed import send
from services.worker.runs import Run
from services.worker.worker import Worker

RENEW_S = 0.5


class Reservations:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def renew_all(self) -> None:
        """For as long as the worker lives."""
        while True:
            await asyncio.sleep(RENEW_S)
            by_peer: dict[str, list[LeaseItem]] = {}
            for run in self._worker.runs:
                if run.hop == 1 and run.partner:
                    by_peer.setdefault(run.partner, []).append(LeaseItem(run=run.id, verb=LeaseVerb.RENEW))
            for peer, items in by_peer.items():
                self._say(peer, tuple(items))

    def release(self, run: Run) -> None:
        """The run ended here without having been handed on."""
        if run.hop == 1 and run.partner:
            self._say(run.partner, (LeaseItem(run=run.id, verb=LeaseVerb.RELEASE),))

    def _say(self, peer: str, items: tuple[LeaseItem, ...]) -> None:
        bus = self._worker.bus
        try:
            send(bus, self._worker.subjects.decode_lease(peer), Lease(process=bus.process, items=items))
        except BusError:
            return  # the lease runs out by itself
