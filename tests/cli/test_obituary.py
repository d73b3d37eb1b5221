"""`hr.dead.<id>`: three times, the right cause, and no exception while NATS is away."""

from __future__ import annotations

from random import Random

import pytest

from schemas.codec import decode
from schemas.state import Cause, Death
from schemas.subjects import Subjects
from services.bus import deaths
from services.bus.deaths import TIMES
from services.bus.memory import MemoryBroker, MemoryBus
from services.cli.up.obituary import Obituaries
from tests.waiting import until

PROCESS = "d1-0k3v9x00abcde"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "APART_S", 0.0)


@pytest.mark.parametrize(("code", "cause"), [(0, Cause.LEFT), (1, Cause.KILLED), (-9, Cause.KILLED)])
async def test_a_death_is_told_three_times(code: int, cause: Cause) -> None:
    broker = MemoryBroker(random=Random(1))
    mine, other = MemoryBus(broker, "supervisor"), MemoryBus(broker, "router")
    heard: list[Death] = []
    await other.subscribe(Subjects().dead_any(), lambda msg: heard.append(decode(msg.data, Death)))
    obituaries = Obituaries(mine, Subjects())
    obituaries.announce(PROCESS, code)
    await obituaries.finish(5)
    await until(lambda: len(heard) == TIMES)
    assert set(heard) == {Death(process=PROCESS, cause=cause)}


async def test_nats_away_is_no_error() -> None:
    bus = MemoryBus(MemoryBroker(random=Random(1)), "supervisor")
    bus.disconnect()
    obituaries = Obituaries(bus, Subjects())
    obituaries.announce(PROCESS, 1)
    await obituaries.finish(5)
    assert not obituaries._running
