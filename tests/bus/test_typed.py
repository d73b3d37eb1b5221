"""The typed layer over both buses: nothing unreadable is half-read, and nobody waits for a time-out."""

from __future__ import annotations

import pytest

from schemas.codec import encode
from schemas.control import CancelAck, Control, Verb
from schemas.errors import NoResponders, UnreadableMessage, UnsupportedSchema
from schemas.placement import Queue, Refused, SubmitAnswer
from services.bus.interface import Msg
from services.bus.typed import Refusals, answer, ask, family, listen, send
from services.clock import ManualClock
from services.telemetry.metrics import Metrics
from tests.bus.conftest import NewBus
from tests.waiting import PATIENCE_S, until

CANCEL = Control(run=7, job="0" * 32, verb=Verb.CANCEL)
FROM_THE_FUTURE = Control(schema=99, run=7, job="0" * 32, verb=Verb.CANCEL)


async def test_send_and_listen(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    got: list[tuple[Control, str]] = []
    await listen(two, "hr.ctl.two", Control, lambda message, msg: got.append((message, msg.reply)), refusals=Refusals())
    await two.flush(PATIENCE_S)
    send(one, "hr.ctl.two", CANCEL, reply="hr.ctl.one")
    await until(lambda: got)
    assert got == [(CANCEL, "hr.ctl.one")]


async def test_ask_reads_one_of_several_answers(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    answers: list[SubmitAnswer] = [Queue(router="r"), Refused(code="overloaded", reason="full", retry_after=2.0)]
    sent = list(answers)
    await listen(two, "hr.submit.m", Control, lambda _, msg: _ignore(answer(two, msg, sent.pop(0))), refusals=Refusals())
    await two.flush(PATIENCE_S)
    got: list[SubmitAnswer] = [await ask(one, "hr.submit.m", CANCEL, SubmitAnswer, timeout=PATIENCE_S) for _ in range(2)]
    assert got == answers


async def test_the_unreadable_is_refused_counted_and_answered_at_once(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    metrics, clock = Metrics.collecting("x"), ManualClock()
    refusals = Refusals(metrics, clock)
    got: list[Control] = []
    await listen(two, "hr.ctl.two", Control, lambda message, _: got.append(message), refusals=refusals)
    await two.flush(PATIENCE_S)
    with pytest.raises(UnreadableMessage):
        await ask(one, "hr.ctl.two", CancelAck(router="r", job="j"), CancelAck, timeout=30.0)
    with pytest.raises(UnsupportedSchema):
        await ask(one, "hr.ctl.two", FROM_THE_FUTURE, CancelAck, timeout=30.0)
    for data in (b"", b"\xc1", b"{}", encode(CANCEL)[:-1], encode(CANCEL) + b"x"):
        one.publish("hr.ctl.two", data)
    await until(lambda: refusals.refused.total() == 7)
    assert refusals.refused == {("ctl", "unreadable_message"): 6, ("ctl", "unsupported_schema"): 1}
    text = metrics.prometheus_text().decode()
    assert 'headrace_bus_refused_total{family="ctl",reason="unreadable_message"} 6.0' in text
    assert got == []
    send(one, "hr.ctl.two", CANCEL)
    await until(lambda: got == [CANCEL])


async def test_an_unreadable_answer_is_not_half_read(new_bus: NewBus) -> None:
    one, two = await new_bus("one"), await new_bus("two")
    await two.subscribe("r", lambda msg: two.publish(msg.reply, b"rubbish"))
    await two.flush(PATIENCE_S)
    with pytest.raises(UnreadableMessage):
        await ask(one, "r", CANCEL, CancelAck, timeout=30.0)


async def test_refusals_are_logged_at_most_once_a_second(new_bus: NewBus, caplog: pytest.LogCaptureFixture) -> None:
    bus = await new_bus("one")
    clock = ManualClock()
    refusals = Refusals(clock=clock)
    await listen(bus, "hr.ctl.x", Control, lambda *_: None, refusals=refusals)
    for _ in range(50):
        bus.publish("hr.ctl.x", b"bad")
    await until(lambda: refusals.refused.total() == 50)
    assert len([record for record in caplog.records if "unreadable" in record.message]) == 1


async def test_nobody_listened_is_counted_and_never_malformed(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    refusals = Refusals()
    hooked: list[bool] = []
    got: list[Control] = []
    await listen(
        bus,
        "hr.ctl.one",
        Control,
        lambda message, _: got.append(message),
        refusals=refusals,
        on_unheard=lambda: hooked.append(True),
    )
    send(bus, "hr.reply.gone", CANCEL, reply="hr.ctl.one")
    await until(lambda: hooked)
    assert (refusals.unheard, refusals.refused.total(), got) == ({"ctl": 1}, 0, [])
    with pytest.raises(NoResponders):
        await ask(bus, "hr.submit.gone", CANCEL, CancelAck, timeout=30.0)


async def test_a_bad_frame_is_not_answered_on_its_senders_control_subject(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    refusals = Refusals()
    answered: list[Msg] = []
    await bus.subscribe("hr.ctl.w", answered.append)
    await listen(bus, "hr.reply.e", Control, lambda *_: None, refusals=refusals)
    bus.publish("hr.reply.e", b"bad", reply="hr.ctl.w")
    await until(lambda: refusals.refused.total() == 1)
    await bus.flush(PATIENCE_S)
    assert answered == []


async def test_answering_while_disconnected_is_the_askers_timeout(new_bus: NewBus) -> None:
    bus = await new_bus("one")
    await bus.close()
    assert answer(bus, Msg("s", b"", "_INBOX.x"), CANCEL) is False
    assert answer(bus, Msg("s", b""), CANCEL) is False


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("hr.decode.d1-0000000000000.handoff", "decode"),
        ("hr.state.edge.e1", "state"),
        ("_INBOX.router.r1.7", "_INBOX"),
        ("acme.hr.reply.e1", "reply"),
        ("whatever.a.b.c", "other"),
    ],
)
def test_families_are_bounded(subject: str, expected: str) -> None:
    assert family(subject) == expected


def _ignore(_: object) -> None:
    return None
