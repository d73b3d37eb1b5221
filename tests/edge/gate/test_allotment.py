"""Limits that several edges share."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import BusUnavailable
from services.bus.counters import Count as Counted
from services.clock import ManualClock
from services.edge.gate.allotment import SLICES, WINDOW_S, Allotment, Verdict
from tests.waiting import PATIENCE_S, until


class FakeCounter:
    """A counter that answers after a few turns of the loop, loses some answers, and may be down."""

    def __init__(self, seed: int = 0, lost: float = 0.0) -> None:
        self.values: Count[int] = Count()
        self.down = False
        self.asked = 0
        self.era, self._lost_in = 0, -1
        self._random = Random(seed)
        self._lost = lost

    def lose(self) -> None:
        self.era, self._lost_in = self.era + 1, max(self.values)
        self.values.clear()

    async def __call__(self, window: int, amount: int) -> Counted:
        self.asked += 1
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        if self.down:
            raise BusUnavailable("down")
        self.values[window] += amount
        counted = Counted(self.values[window], self.era if window <= self._lost_in else 0)
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        if self._random.random() < self._lost:
            raise BusUnavailable("lost")
        return counted


@given(
    seed=st.integers(0, 2**32),
    edges=st.integers(1, 5),
    limit=st.integers(1, 400),
    amounts=st.lists(st.integers(1, 60), max_size=80),
)
@settings(max_examples=60)
def test_never_more_than_the_limit_and_little_less(seed: int, edges: int, limit: int, amounts: list[int]) -> None:
    async def run() -> None:
        counter, clock, random = FakeCounter(seed), ManualClock(), Random(seed)
        allotments = [Allotment(counter, clock, limit) for _ in range(edges)]
        asked = [(random.choice(allotments), amount) for amount in amounts]
        verdicts = await asyncio.gather(*(allotment.take(amount, 5.0) for allotment, amount in asked))
        granted = sum(amount for (_, amount), verdict in zip(asked, verdicts, strict=True) if verdict is Verdict.GRANTED)
        assert granted <= limit
        refused = [amount for (_, amount), verdict in zip(asked, verdicts, strict=True) if verdict is not Verdict.GRANTED]
        if refused and max(amounts) == 1:
            assert granted >= limit - 2 * edges * max(1, limit // SLICES)

    asyncio.run(run())


async def test_five_hundred_at_once_over_three_edges() -> None:
    counter, clock = FakeCounter(1), ManualClock()
    edges = [Allotment(counter, clock, 100) for _ in range(3)]
    verdicts = await asyncio.gather(*(edges[number % 3].take(1) for number in range(500)))
    granted = verdicts.count(Verdict.GRANTED)
    assert 100 - 3 * 2 * (100 // SLICES) <= granted <= 100


async def test_a_request_does_not_wait_while_there_is_an_allotment() -> None:
    counter = FakeCounter()
    allotment = Allotment(counter, ManualClock(), 3200)
    assert await allotment.take(1) is Verdict.GRANTED
    asked = counter.asked
    for _ in range(20):
        assert await allotment.take(1) is Verdict.GRANTED
    assert counter.asked == asked


@pytest.mark.parametrize("seed", range(5))
async def test_lost_answers_cost_admissions_and_never_admit(seed: int) -> None:
    counter, clock = FakeCounter(seed, lost=0.3), ManualClock()
    edges = [Allotment(counter, clock, 100) for _ in range(3)]
    granted = 0
    for number in range(300):
        granted += await edges[number % 3].take(1) is Verdict.GRANTED
        clock.advance(0.1)
    assert 0 < granted <= 100


async def test_the_next_window_is_new() -> None:
    allotment = Allotment(FakeCounter(), clock := ManualClock(), 2)
    taken = [await allotment.take(1) for _ in range(3)]
    assert taken == [Verdict.GRANTED, Verdict.GRANTED, Verdict.SPENT]
    clock.advance(allotment.resets_in() + 0.001)
    assert await allotment.take(1) is Verdict.GRANTED


async def test_what_is_given_back_can_be_taken_again_in_its_window_only() -> None:
    allotment = Allotment(FakeCounter(), clock := ManualClock(), 10)
    assert await allotment.take(10) is Verdict.GRANTED
    first = allotment.window
    assert await allotment.take(4) is Verdict.SPENT
    allotment.give_back(4, first)
    assert await allotment.take(4) is Verdict.GRANTED
    clock.advance(61)
    allotment.give_back(100, first)
    assert await allotment.take(11) is not Verdict.GRANTED


@pytest.mark.parametrize("seed", range(20))
async def test_a_counter_that_was_lost_gets_back_what_was_taken(seed: int) -> None:
    """By each edge, however much it had taken and whoever comes first."""
    counter, clock, random = FakeCounter(seed), ManualClock(), Random(seed)
    edges, granted = [Allotment(counter, clock, 100) for _ in range(3)], 0

    async def spend(edge: Allotment, most: int) -> int:
        for taken in range(most):
            if await edge.take(1) is not Verdict.GRANTED:
                return taken
        return most

    for edge, most in zip(edges, (50, 25, 5), strict=True):
        granted += await spend(edge, random.randrange(1, most))
    counter.lose()
    for _ in range(3):
        for edge in random.sample(edges, 3):
            granted += await spend(edge, 200)
        clock.advance(1.1)
    assert 100 - 3 * 2 * (100 // SLICES) <= granted <= 100
    await until(lambda: granted <= counter.values[edges[0].window] <= 100)


async def test_of_later_windows_nothing_was_lost() -> None:
    counter, clock = FakeCounter(), ManualClock()
    allotment = Allotment(counter, clock, 100)
    assert await allotment.take(1) is Verdict.GRANTED
    counter.lose()
    clock.advance(120)
    assert await allotment.take(100) is Verdict.GRANTED


async def test_who_comes_first_after_a_loss_takes_nothing_that_others_had() -> None:
    """As long as those did not add theirs again: it may be more than is left."""
    counter, clock = FakeCounter(), ManualClock()
    one, other = (Allotment(counter, clock, 100) for _ in range(2))
    assert await one.take(90) is Verdict.GRANTED
    counter.lose()
    assert await other.take(90) is Verdict.SPENT


async def test_without_the_counter_what_is_held_is_spent_and_then_nothing_is_known() -> None:
    counter = FakeCounter()
    allotment = Allotment(counter, clock := ManualClock(), 64)
    assert await allotment.take(1) is Verdict.GRANTED
    held = allotment.held
    counter.down = True
    verdicts = [await allotment.take(1) for _ in range(held + 3)]
    assert verdicts == [Verdict.GRANTED] * held + [Verdict.UNKNOWN] * 3
    assert allotment.remaining == 0
    counter.down = False
    clock.advance(1.0)
    assert await allotment.take(1) is Verdict.GRANTED


async def test_a_request_too_large_for_what_is_left_takes_nothing_from_others() -> None:
    counter, clock = FakeCounter(), ManualClock()
    one, other = (Allotment(counter, clock, 1000) for _ in range(2))
    assert await one.take(600) is Verdict.GRANTED
    assert await other.take(500) is Verdict.SPENT
    for _ in range(20):
        await asyncio.sleep(0)
    assert counter.values[one.window] <= 600 + 3 * (1000 // SLICES)
    clock.advance(1.1)
    assert await one.take(300) is Verdict.GRANTED


async def test_a_request_too_large_for_what_is_left_leaves_what_another_waits_for() -> None:
    counter, clock = FakeCounter(), ManualClock()
    one, other = (Allotment(counter, clock, 100) for _ in range(2))
    assert await one.take(50) is Verdict.GRANTED
    verdicts = await asyncio.gather(*(other.take(amount, PATIENCE_S) for amount in (80, 40)))
    assert verdicts == [Verdict.SPENT, Verdict.GRANTED]


async def test_what_came_back_goes_to_others_unless_it_is_soon_needed_here() -> None:
    counter, clock = FakeCounter(), ManualClock()
    one, other = (Allotment(counter, clock, 1000, kept_s=0.05) for _ in range(2))
    assert await one.take(900) is Verdict.GRANTED
    one.give_back(880, one.window)
    asked = counter.asked
    assert await one.take(880) is Verdict.GRANTED
    assert counter.asked == asked, "here it was kept"
    one.give_back(880, one.window)
    await until(lambda: counter.values[one.window] <= 20 + 2 * (1000 // SLICES))
    assert await other.take(900) is Verdict.GRANTED


@pytest.mark.parametrize("seed", range(5))
async def test_who_gave_up_waiting_leaves_nothing_behind(seed: int) -> None:
    counter, random = FakeCounter(seed), Random(seed)
    one, other = (Allotment(counter, ManualClock(), 10_000, kept_s=0.05) for _ in range(2))
    waiting = [asyncio.create_task(one.take(1000, 5.0)) for _ in range(8)]
    for _ in range(random.randrange(8)):
        await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    granted = sum(not each.cancelled() for each in waiting) * 1000
    left = 10_000 - granted - 2 * (10_000 // SLICES)
    await until(lambda: counter.values[one.window] <= 10_000 - left)
    assert await other.take(left, 5.0) is Verdict.GRANTED


async def test_what_requests_wait_for_is_asked_for_once() -> None:
    """Those that come while the counter is being asked are in the next question, however often they look."""
    counter, go_on = FakeCounter(), asyncio.Event()

    async def slow(window: int, amount: int) -> Counted:
        await go_on.wait()
        return await counter(window, amount)

    one = Allotment(slow, ManualClock(), 10_000)
    waiting = [asyncio.create_task(one.take(50, 5.0))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the first is asked for
    waiting += [asyncio.create_task(one.take(50, 5.0)) for _ in range(40)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*waiting) == [Verdict.GRANTED] * 41
    assert one.held <= 2 * (10_000 // SLICES)


async def test_what_is_left_is_told_as_far_as_it_was_heard() -> None:
    counter, clock = FakeCounter(), ManualClock()
    one, other = (Allotment(counter, clock, 1000) for _ in range(2))
    assert (one.remaining, other.remaining) == (1000, 1000)
    assert await one.take(600) is Verdict.GRANTED
    assert (one.remaining, other.remaining) == (400, 1000)
    assert await other.take(1) is Verdict.GRANTED
    assert other.remaining == 1000 - 600 - one.held - 1
    assert await other.take(500) is Verdict.SPENT
    assert other.remaining <= 400
    clock.advance(WINDOW_S)
    assert other.remaining == 1000


async def test_more_than_the_limit_is_never_granted() -> None:
    assert await Allotment(FakeCounter(), ManualClock(), 10).take(11) is Verdict.SPENT
