"""The ledger's old rows: each edge looks now and then, and what is kept no longer goes, a little at a time."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Protocol

from schemas.errors import StoreUnavailable
from services.telemetry.metrics import Metrics

SWEEP_S = 600.0
AGAIN_S = 1.0
"""While there is more: others want to write too."""
_log = logging.getLogger(__name__)


class Sweepable(Protocol):
    async def sweep(self, keep_s: float) -> bool:
        """True: there is more to forget. Raises `StoreUnavailable`."""
        ...


async def forget_old(store: Sweepable, keep_s: float, random: Random, metrics: Metrics) -> None:
    """Until cancelled. Edges that share a database do the same work; what one has done, another one finds done."""
    more = False
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * (AGAIN_S if more else SWEEP_S))
        try:
            more = await store.sweep(keep_s)
        except Exception as error:  # whatever it is, rows must not pile up for good
            more = False
            metrics.store_failures.add(1, {"operation": "sweep"})
            if not isinstance(error, StoreUnavailable):
                _log.exception("old rows of the ledger were not removed; it is tried again")
