"""What a simulation does to the bus in memory: cut connections, lose, double and delay messages."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from schemas.errors import Disconnected, NoResponders, RequestTimeout
from services.bus.memory import Delivery, MemoryBroker, MemoryBus, soon
from services.clock import ManualClock
from tests.waiting import PATIENCE_S, until


def _pair(clock: ManualClock | None = None) -> tuple[MemoryBroker, MemoryBus, MemoryBus]:
    broker = MemoryBroker(random=Random(1))
    return broker, MemoryBus(broker, "one", clock=clock), MemoryBus(broker, "two", clock=clock)


async def test_a_cut_connection_neither_sends_nor_hears_and_hears_again_after() -> None:
    clock = ManualClock()
    _, one, two = _pair(clock)
    got: list[bytes] = []
    await two.subscribe("a", lambda msg: got.append(msg.data))
    one.publish("a", b"on its way")
    two.disconnect()
    clock.advance(2.0)
    await asyncio.sleep(0)
    assert (two.connected, two.down_for(), two.steady_for(), got) == (False, 2.0, 0.0, [])
    with pytest.raises(Disconnected):
        two.publish("a", b"")
    with pytest.raises(NoResponders):
        await one.request("a", b"", timeout=PATIENCE_S)
    two.reconnect()
    clock.advance(3.0)
    assert (two.connected, two.down_for(), two.steady_for()) == (True, 0.0, 3.0)
    one.publish("a", b"again")
    await until(lambda: got)
    assert got == [b"again"]


async def test_messages_can_be_lost_doubled_and_delayed() -> None:
    broker, one, two = _pair()
    got: list[bytes] = []
    held: list[Delivery] = []
    await two.subscribe("a", lambda msg: got.append(msg.data))

    def faults(delivery: Delivery) -> None:
        if delivery.msg.data == b"double":
            soon(delivery)
        if delivery.msg.data == b"delay":
            held.append(delivery)
        elif delivery.msg.data != b"lose":
            soon(delivery)

    broker.deliver = faults
    for data in (b"lose", b"delay", b"double", b"plain"):
        one.publish("a", data)
    await until(lambda: len(got) == 3)
    assert held[0].sender == "one"
    held[0]()
    assert got == [b"double", b"double", b"plain", b"delay"]


async def test_a_lost_request_times_out() -> None:
    broker, one, two = _pair()
    await two.subscribe("a", lambda msg: two.publish(msg.reply, b""))
    broker.deliver = lambda delivery: None
    with pytest.raises(RequestTimeout):
        await one.request("a", b"", timeout=0.01)


async def test_a_closed_bus_stays_closed() -> None:
    _, one, _ = _pair()
    await one.close()
    one.reconnect()
    assert not one.connected
