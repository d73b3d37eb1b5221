"""What `interface.Bus` promises, asked of every implementation."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import Disconnected, IllegalSubject, MessageTooLarge, NoResponders, RequestTimeout
from services.bus.interface import Bus, Handler, Msg
from tests.bus.conftest import NewBus
from tests.waiting import PATIENCE_S, until


def _echo(bus: Bus) -> Handler:
    return lambda msg: bus.publish(msg.reply, msg.data.upper(), headers={"Served-By": bus.process})


async def test_a_message_arrives_as_it_was_sent(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    got: list[Msg] = []
    await two.subscribe("t.a", got.append)
    await two.flush(PATIENCE_S)
    one.publish("t.a", b"\x00\r\nx", reply="t.b", headers={"Traceparent": "00-ab"})
    one.publish("t.a", b"")
    await until(lambda: len(got) == 2)
    assert (got[0].subject, got[0].data, got[0].reply) == ("t.a", b"\x00\r\nx", "t.b")
    assert dict(got[0].headers) == {"Traceparent": "00-ab"}
    assert (got[1].data, got[1].reply, dict(got[1].headers)) == (b"", "", {})


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("w.*.c", ["w.b.c"]),
        ("w.>", ["w.b", "w.b.c", "w.b.c.d"]),
        ("w.b.*", ["w.b.c"]),
        ("w.b", ["w.b"]),
        ("*.b", ["w.b", "x.b"]),
    ],
)
async def test_wildcards(new_bus: NewBus, pattern: str, heard: list[str]) -> None:
    bus = await new_bus("one")
    got: list[str] = []
    end: list[Msg] = []
    await bus.subscribe(pattern, lambda msg: got.append(msg.subject))
    await bus.subscribe("end", end.append)
    for subject in ("w", "w.b", "w.b.c", "w.b.c.d", "x.b", "end"):
        bus.publish(subject, b"")
    await until(lambda: end)
    assert got == heard


@pytest.mark.parametrize(("subject", "reply"), [("", ""), ("a b", ""), ("a\r\nPUB b 0", ""), ("a\x00", ""), ("a", "b c")])
async def test_an_illegal_subject_is_refused(new_bus: NewBus, subject: str, reply: str) -> None:
    bus = await new_bus("one")
    with pytest.raises(IllegalSubject):
        bus.publish(subject, b"", reply=reply)


async def test_order_of_one_connection_is_kept(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    got: list[int] = []
    await two.subscribe("o.*", lambda msg: got.append(int(msg.data)))
    await two.flush(PATIENCE_S)
    for number in range(2_000):
        one.publish(f"o.{number % 3}", str(number).encode())
    await until(lambda: len(got) == 2_000)
    assert got == list(range(2_000))


async def test_delivery_is_never_inside_publish(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    inside, seen = False, []
    await bus.subscribe("n", lambda msg: seen.append(inside))
    await bus.flush(PATIENCE_S)
    inside = True
    bus.publish("n", b"")
    inside = False
    await until(lambda: seen)
    assert seen == [False]


async def test_a_queue_group_gets_each_message_once(new_bus: NewBus) -> None:
    one, two, three = await new_bus("one"), await new_bus("two"), await new_bus("three")
    got: dict[str, list[bytes]] = {"two": [], "three": [], "all": []}
    await two.subscribe("q", lambda msg: got["two"].append(msg.data), queue="g")
    await three.subscribe("q", lambda msg: got["three"].append(msg.data), queue="g")
    await three.subscribe("q", lambda msg: got["all"].append(msg.data))
    await asyncio.gather(two.flush(PATIENCE_S), three.flush(PATIENCE_S))
    sent = [str(number).encode() for number in range(200)]
    for data in sent:
        one.publish("q", data)
    await until(lambda: len(got["two"]) + len(got["three"]) == 200 and len(got["all"]) == 200)
    assert sorted(got["two"] + got["three"]) == sorted(sent)
    assert got["two"]
    assert got["three"]


async def test_request_and_answer(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    await two.subscribe("r", _echo(two))
    await two.flush(PATIENCE_S)
    answers = await asyncio.gather(*(one.request("r", b"a%d" % n, timeout=PATIENCE_S) for n in range(50)))
    assert [answer.data for answer in answers] == [b"A%d" % n for n in range(50)]
    assert answers[0].headers["Served-By"] == two.process


async def test_no_responders_is_known_at_once(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    with pytest.raises(NoResponders):
        await bus.request("nobody.here", b"", timeout=30.0)


async def test_a_publish_with_reply_hears_that_nobody_listens(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    mine: list[Msg] = []
    others: list[Msg] = []
    await one.subscribe("ctl.one", mine.append)
    await two.subscribe("ctl.one", others.append)
    await two.flush(PATIENCE_S)
    one.publish("nobody.here", b"x", reply="ctl.one")
    await until(lambda: mine)
    assert mine[0].no_responders
    await two.flush(PATIENCE_S)
    assert others == []


async def test_silence_times_out_and_a_late_answer_is_dropped(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    held: list[Msg] = []
    await two.subscribe("slow", held.append)
    await two.subscribe("r", _echo(two))
    await two.flush(PATIENCE_S)
    with pytest.raises(RequestTimeout):
        await one.request("slow", b"", timeout=0.05)
    await until(lambda: held)
    two.publish(held[0].reply, b"late")
    assert (await one.request("r", b"next", timeout=PATIENCE_S)).data == b"NEXT"


async def test_unsubscribed_means_silence(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    gone: list[Msg] = []
    end: list[Msg] = []
    subscription = await bus.subscribe("u", gone.append)
    await bus.subscribe("end", end.append)
    bus.publish("u", b"on its way")
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    bus.publish("u", b"after")
    bus.publish("end", b"")
    await until(lambda: end)
    assert gone == []


async def test_a_drained_subscription_hears_what_was_on_its_way_and_no_more(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    got: list[bytes] = []
    subscription = await two.subscribe("d", lambda msg: got.append(msg.data))
    await two.flush(PATIENCE_S)
    for number in range(500):
        one.publish("d", b"%d" % number)
    await one.flush(PATIENCE_S)
    await subscription.drain(PATIENCE_S)
    assert len(got) == 500
    one.publish("d", b"after")
    await one.flush(PATIENCE_S)
    await two.flush(PATIENCE_S)
    await subscription.drain(PATIENCE_S)
    await subscription.unsubscribe()
    assert len(got) == 500


async def test_a_handler_that_raises_hears_the_next_message(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    got: list[bytes] = []

    def handler(msg: Msg) -> None:
        got.append(msg.data)
        raise RuntimeError("a bug")

    await bus.subscribe("h", handler)
    bus.publish("h", b"1")
    bus.publish("h", b"2")
    await until(lambda: len(got) == 2)


async def test_too_large_is_refused_headers_counted(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    got: list[Msg] = []
    await bus.subscribe("big", got.append)
    with pytest.raises(MessageTooLarge):
        bus.publish("big", bytes(bus.max_payload + 1))
    with pytest.raises(MessageTooLarge):
        bus.publish("big", bytes(bus.max_payload), headers={"A": "b"})
    with pytest.raises(MessageTooLarge):
        await bus.request("big", bytes(bus.max_payload), timeout=PATIENCE_S, headers={"A": "b"})
    bus.publish("big", bytes(bus.max_payload))
    await until(lambda: got)
    assert len(got) == 1
    assert len(got[0].data) == bus.max_payload
    assert bus.connected


async def test_closed_means_disconnected(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    held: list[Msg] = []
    await two.subscribe("held", held.append)
    await two.flush(PATIENCE_S)
    asking = asyncio.create_task(one.request("held", b"", timeout=30.0))
    await until(lambda: held)
    await one.close()
    await one.close()
    assert not one.connected
    with pytest.raises(Disconnected):
        await asking
    with pytest.raises(Disconnected):
        one.publish("x", b"")
    with pytest.raises(Disconnected):
        await one.request("x", b"", timeout=PATIENCE_S)
    with pytest.raises(Disconnected):
        await one.subscribe("x", held.append)
    with pytest.raises(Disconnected):
        await one.flush(PATIENCE_S)


async def test_drain_hands_over_what_came_and_sends_what_was_published(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    got: list[bytes] = []
    answered: list[bytes] = []

    def handler(msg: Msg) -> None:
        got.append(msg.data)
        two.publish("answers", msg.data)

    await two.subscribe("work", handler)
    await one.subscribe("answers", lambda msg: answered.append(msg.data))
    await asyncio.gather(one.flush(PATIENCE_S), two.flush(PATIENCE_S))
    sent = [str(number).encode() for number in range(100)]
    for data in sent:
        one.publish("work", data)
    await one.flush(PATIENCE_S)
    await two.drain(PATIENCE_S)
    await until(lambda: len(answered) == 100)
    assert got == answered == sent
    assert not two.connected


async def test_steady_for_ever_when_never_lost(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    assert bus.down_for() == 0.0
    assert bus.steady_for() == float("inf")
