from __future__ import annotations

import pytest

from schemas.codec import SchemaRange
from schemas.state import Capabilities, QueueReport, Role
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Refusals, listen
from services.clock import ManualClock
from services.router.drain_rate import WINDOW_S, DrainRate
from services.router.report import CARD_S, Reporter, card
from services.router.view import View
from services.router.waiting import Waiting
from tests.router.fakes import MODEL, SUBJECTS, a_process, a_state
from tests.waiting import until

ROUTER = a_process("router")


def test_the_card_says_what_every_worker_can_do() -> None:
    p = a_state(
        a_process("p"), Role.PREFILL, capabilities=Capabilities(seed=True, n=True, grammar=("json_object", "regex")), weights="b"
    )
    d = a_state(
        a_process("d"),
        Role.DECODE,
        capabilities=Capabilities(seed=True, grammar=("regex",), must_hand_off=True, cancel_during_handoff=False),
        context_length=2048,
        schemas=SchemaRange(oldest=1, newest=2),
        weights="a",
    )
    made = card(MODEL, [p, d])
    assert made.capabilities == Capabilities(seed=True, grammar=("regex",), must_hand_off=True, cancel_during_handoff=False)
    assert made.context_length == 2048
    assert made.weights == ("a", "b")
    assert made.schemas == SchemaRange(oldest=1, newest=1)


def test_drain_rate_over_the_last_seconds() -> None:
    clock = ManualClock()
    rate = DrainRate(clock)
    assert rate.of(MODEL) == 0.0
    for _ in range(4):
        rate.add(MODEL)
    clock.advance(2.0)
    assert rate.of(MODEL) == pytest.approx(2.0)
    clock.advance(WINDOW_S - 3.0)
    rate.add(MODEL)
    assert rate.of(MODEL) == pytest.approx(5 / 9)
    clock.advance(1.5)
    assert rate.of(MODEL) == pytest.approx(0.1)
    assert rate.of("another") == 0.0


async def test_the_card_comes_once_a_second_and_at_once_for_a_new_model() -> None:
    clock, broker = ManualClock(), MemoryBroker()
    bus = MemoryBus(broker, ROUTER, clock=clock)
    view = View(clock, bus)
    reporter = Reporter(bus, SUBJECTS, view, Waiting(ROUTER, SUBJECTS, clock), DrainRate(clock), clock, MODEL)
    heard: list[QueueReport] = []
    edge = MemoryBus(broker, a_process("edge"))
    await listen(edge, SUBJECTS.queue_any(), QueueReport, lambda report, _: heard.append(report), refusals=Refusals())
    reporter.say(MODEL)
    view.observe(a_state(a_process("d1"), Role.DECODE))
    for _ in range(2):
        reporter.say(MODEL)
    clock.advance(CARD_S)
    reporter.say(MODEL)
    bus.disconnect()
    reporter.say(MODEL)
    bus.reconnect()
    reporter.say(MODEL)
    await until(lambda: len(heard) == 5)
    assert [report.card is not None for report in heard] == [False, True, False, True, False]
