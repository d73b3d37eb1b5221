"""Which edges live, and how far their clocks are from ours."""

from __future__ import annotations

from schemas.job import Deadlines
from schemas.state import EdgeBeat
from services.bus.memory import MemoryBroker, MemoryBus
from services.clock import ManualClock
from services.worker.edges import EdgeWatch

EDGE = "e1-mx235xkkixxjc"


def watch() -> tuple[EdgeWatch, ManualClock]:
    clock = ManualClock()
    return EdgeWatch(MemoryBus(MemoryBroker(), "p1-mx235xkkixxjd", clock=clock), clock), clock


def left(edges: EdgeWatch, clock: ManualClock, ahead: float) -> float:
    """What remains of 10 s that begin now by the edge's clock, which runs `ahead` of ours."""
    return edges.remaining(EDGE, Deadlines(stamp=clock.wall() + ahead, total=10.0), 10.0)


def test_the_smallest_offset_counts() -> None:
    edges, clock = watch()
    for late in (0.3, 0.01, 0.2):
        edges.beat(EdgeBeat(process=EDGE, sent=clock.wall() - late))
    assert abs(left(edges, clock, 0.0) - 10.01) < 0.001


def test_a_clock_that_is_set_counts_after_a_while() -> None:
    """One beat from a clock that ran an hour ahead must not make every later job of that edge look expired."""
    edges, clock = watch()
    edges.beat(EdgeBeat(process=EDGE, sent=clock.wall() + 3600))
    assert left(edges, clock, 0.0) < 0
    for _ in range(100):
        clock.advance(0.5)
        edges.beat(EdgeBeat(process=EDGE, sent=clock.wall()))
    assert abs(left(edges, clock, 0.0) - 10.0) < 0.001
