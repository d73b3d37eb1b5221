"""A worker whose model is on its way answers what it is at, and nothing else."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from schemas.errors import NoResponders
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.micro import Service
from services.clock import ManualClock
from services.models.progress import Logged
from services.worker.loading import answering
from tests.waiting import PATIENCE_S

SUBJECT = "hr.admin.decode.d1.status"


async def test_the_status_of_a_worker_that_waits_for_its_model() -> None:
    broker = MemoryBroker()
    bus, caller = MemoryBus(broker, "d1"), MemoryBus(broker, "someone")
    clock = ManualClock()
    progress = Logged(logging.getLogger("test"), clock)

    async def asked() -> Any:
        return json.loads((await caller.request(SUBJECT, b"{}", timeout=PATIENCE_S)).data)["loading"]

    async with answering(Service(bus, "headrace-decode", "0.1.0", "d"), SUBJECT, "tiny", progress):
        nothing = {"model": "tiny", "doing": "looking for the model", "for_s": 0.0, "done": 0, "total": 0, "trouble": ""}
        assert await asked() == nothing
        clock.advance(5)
        with progress.bar("Fetching tiny", 100) as advance:
            advance(40)
            clock.advance(2)
            assert await asked() == nothing | {"doing": "Fetching tiny", "for_s": 2.0, "done": 40, "total": 100}
            progress.warn("s3://b: 503 SlowDown; asking again")
            assert (await asked())["trouble"] == "s3://b: 503 SlowDown; asking again"
            advance(1)
            assert (await asked())["trouble"] == ""
        progress.begin("loading it into the engine")
        clock.advance(90)
        assert await asked() == nothing | {"doing": "loading it into the engine", "for_s": 90.0}
    with pytest.raises(NoResponders):
        await caller.request(SUBJECT, b"{}", timeout=PATIENCE_S)
