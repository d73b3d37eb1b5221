"""What the engine keeps and nobody uses: the canary, the books, the replacement; and that statistics fail no request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from schemas.lifecycle import State
from schemas.state import Role
from services.clock import ManualClock, SystemClock
from services.engine.protocol import EngineWorn, StepReport
from services.engine.trtllm_engine.books import Books
from services.engine.trtllm_engine.canary import Canary, warm_up
from services.engine.trtllm_engine.fate import Fate
from services.engine.trtllm_engine.reports import Reports
from services.engine.trtllm_engine.shutdown import end
from services.engine.trtllm_engine.statistics import IterationStatistics, read_iteration
from services.engine.trtllm_engine.watch import Watch
from services.kv.holders import ReservationHolder
from services.kv.pool import BlockPool
from services.telemetry.metrics import Metrics
from services.worker.steps import take_step
from tests.engine.trtllm_engine.double import World
from tests.engine.trtllm_engine.rig import Heard, build, engines, spec
from tests.waiting import until
from tests.worker.rig import rig


async def hand_off(prefill: Heard, run: int) -> None:
    prefill.engine.prefill(spec(run))
    await until(lambda: run in prefill.prefilled)


async def test_the_pool_is_as_large_as_the_first_request_told() -> None:
    async with engines(World(blocks=40), Role.PREFILL) as (prefill,):
        assert prefill.engine.pool.total == 40
        assert prefill.engine.info.context_length == 160, "no context is longer than the pool"


async def test_a_handoff_that_nobody_fetches_is_freed_by_the_canary_and_counts_as_used_until_then() -> None:
    world = World(hole=True)
    async with engines(world, Role.PREFILL, timeout_s=0.6) as (prefill,):
        await hand_off(prefill, 1)
        assert prefill.engine.pool.held == world.engines[0].used == 3
        asked = len(world.engines[0].asked)
        await until(lambda: world.engines[0].used == 0 and prefill.engine.pool.held == 0)
        assert {request.kind for request in world.engines[0].asked[asked:]} == {"context_and_generation"}
        await hand_off(prefill, 2)


async def test_a_fetched_handoff_leaves_the_books_at_once() -> None:
    world = World(hole=True)
    async with engines(world, Role.PREFILL, timeout_s=60.0) as (prefill,):
        await hand_off(prefill, 1)
        sender, request = next(iter(world.handoffs.values()))
        sender.fetched(request)
        await hand_off(prefill, 2)
        await until(lambda: prefill.engine.pool.held == 3)


@pytest.mark.parametrize("world", [World(leak=True, hole=False), World(blocks=4, hole=True)], ids=["leak", "full pool"])
async def test_blocks_that_nobody_uses_end_in_a_replacement(world: World) -> None:
    async with engines(world, Role.PREFILL, timeout_s=0.3) as (prefill,):
        await hand_off(prefill, 1)
        if world.blocks == 4:
            world.blocks = 3  # so that no prompt fits any more, and nothing is cleaned up
        async with asyncio.timeout(20.0):
            with pytest.raises(EngineWorn):
                await prefill.engine.join()


async def test_an_idle_engine_is_not_replaced() -> None:
    async with engines(World(), Role.BOTH, timeout_s=0.1) as (both,):
        for run in range(3):
            both.engine.prefill(spec(run + 1), then_decode=True)
            await until(lambda run=run: run + 1 in both.ended)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.8):
                await both.engine.join()


class QuickCanary(Canary):
    """It answers at once; the statistics are what the test says they are."""

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self.runs = 0

    async def run(self, within: float) -> bool:
        self.runs += 1
        return True


def watch(
    canary: QuickCanary, clock: ManualClock, books: Books | None = None, on_overdue: Callable[[int], None] = lambda _: None
) -> Watch:
    """Of an engine without requests, whose transfers time out after 10 s."""
    nothing: Any = None
    books = books or Books(BlockPool(20), 4, 10.0, clock)
    requests: Any = []
    return Watch(nothing, canary, books, nothing, clock, 10.0, requests, Fate(), lambda _: None, on_overdue)


def using(blocks: int) -> dict[str, object]:
    return {"kvCacheStats": {"usedNumBlocks": blocks, "maxNumBlocks": 20}}


async def test_two_looks_at_old_statistics_are_no_leak() -> None:
    """Each may come before the statistics of the last request's end; between them nothing was in use."""
    clock, canary = ManualClock(), QuickCanary()
    looked = watch(canary, clock)
    for _ in range(3):
        looked.on_statistics(using(5))
        await looked.tick()
        looked.on_statistics(using(0))
        await looked.tick()
        clock.advance(100.0)
    assert canary.runs == 3
    looked.on_statistics(using(5))
    await looked.tick()
    clock.advance(20.5)
    with pytest.raises(EngineWorn, match="5 KV blocks are in use, and nobody uses them"):
        await looked.tick()


@pytest.mark.parametrize("own", [0, 1])
async def test_an_idle_engine_is_asked_whether_a_short_handoff_was_fetched(own: int) -> None:
    """Of one block, as a canary takes it; whether statistics see that or not was measured when the engine began."""
    clock, canary = ManualClock(), QuickCanary(blocks=own)
    books = Books(BlockPool(20), 4, 10.0, clock)
    looked = watch(canary, clock, books)
    books.begin(1, 4)
    books.pin(1)
    looked.on_statistics(using(1 + own))
    await looked.tick()
    assert (canary.runs, books.pinned) == (1, 1), "it is asked, and the handoff is still there"
    looked.on_statistics(using(own))
    await looked.tick()
    assert (canary.runs, books.pinned) == (1, 0)


async def test_what_a_canary_itself_takes_is_no_leak() -> None:
    """An engine with several windows takes a block of each."""
    world = World(prefill_s=0.1)
    engine = build(world, Role.BOTH)
    world.engines[0].block_tokens = 1
    canary = Canary(engine.api, engine.llm, engine.info)
    await warm_up(canary, engine.llm)
    assert canary.blocks == 2
    await engine.stop()
    clock, quick = ManualClock(), QuickCanary(blocks=2)
    looked = watch(quick, clock)
    looked.on_statistics(using(2))
    for _ in range(3):
        await looked.tick()
        clock.advance(100.0)
    assert quick.runs == 0


async def test_unreadable_statistics_and_events_fail_no_request() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        for junk in (None, 3, "not json", {"kvCacheStats": 5}, {"data": {}}, {"event_id": "x", "data": None}):
            world.engines[0].stats.append(junk)
            world.engines[0].events.append(junk)
        both.engine.prefill(spec(1), then_decode=True)
        await until(lambda: both.state(1) is State.FINISHED)
        await until(lambda: both.engine.stats().steps > 0)


async def test_iterations_become_credits_and_rates() -> None:
    world = World(prefill_s=0.3)
    async with engines(world, Role.BOTH) as (both,):
        for run in range(1, 10):
            both.engine.prefill(spec(run, list(range(20, 40)), most=2), then_decode=True)
        stats = both.engine.stats()
        assert (stats.backlog, stats.running) == (180, 9)
        assert stats.queued_tokens == 180 - 64, "one step's worth is in the step in progress"
        await until(lambda: len(both.ended) == 9)
        await until(lambda: both.engine.stats().rates.decode_step_s > 0)
        done = both.engine.stats()
        assert (done.backlog, done.running, done.in_step_s) == (0, 0, 0.0)
        assert done.step_p99_s > 0
        assert done.rates.prefill_tokens_s > 0


async def test_an_engine_that_stands_still_shows_it() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        both.engine.prefill(spec(1, most=100), then_decode=True)
        await until(lambda: both.outputs)
        world.engines[0].stuck = True
        await until(lambda: both.engine.stats().in_step_s > 0.3)


# the books


def test_a_handoff_stays_in_the_books_as_long_as_the_engine_says_so() -> None:
    clock = ManualClock()
    pool = BlockPool(20)
    books = Books(pool, 4, 10.0, clock)
    books.begin(1, 12)
    books.pin(1)
    for _ in range(5):
        clock.advance(9.0)
        books.observe(3)
        pool.expire(clock.monotonic())
        assert pool.held == 3
    assert books.overdue
    clock.advance(21.0)
    assert not books.pinned, "the engine says nothing any more"
    assert pool.held == 0


def test_each_handoff_that_becomes_overdue_is_counted_once() -> None:
    clock = ManualClock()
    books = Books(BlockPool(20), 4, 10.0, clock)
    for run in (1, 2):
        books.begin(run, 12)
        books.pin(run)
        clock.advance(6.0)
    assert books.newly_overdue() == 1
    assert books.newly_overdue() == 0
    clock.advance(6.0)
    books.observe(0)  # the engine gave it up before anybody looked
    assert books.newly_overdue() == 1
    books.begin(3, 12)
    books.pin(3)
    books.observe(0)
    clock.advance(20.0)
    assert books.newly_overdue() == 0, "it was fetched"


async def test_an_overdue_handoff_reaches_the_workers_metrics() -> None:
    """An operator watches this: each keeps blocks for as long as the engine's timeout."""
    clock, told = ManualClock(), list[int]()
    books = Books(BlockPool(20), 4, 10.0, clock)
    looked = watch(QuickCanary(), clock, books, told.append)
    books.begin(1, 12)
    books.pin(1)
    await looked.tick()
    clock.advance(10.5)
    await looked.tick()
    await looked.tick()
    assert told == [1]
    reports: list[StepReport] = []
    asked = Reports(reports.append, lambda error: None)
    asked.unfetched(1)
    asked.unfetched(1)
    await until(lambda: reports)
    assert [report.unfetched for report in reports] == [2]
    metrics = Metrics.collecting("p1-0000000000000")
    async with rig() as r:
        r.prefill.metrics = metrics
        take_step(r.prefill, reports[0])
    assert "headrace_handoffs_unfetched_total 2.0" in metrics.prometheus_text().decode()


def test_the_books_never_call_fewer_blocks_used_than_the_engine() -> None:
    pool = BlockPool(20)
    books = Books(pool, 4, 60.0, SystemClock())
    books.begin(1, 12)
    books.begin(2, 12)
    books.pin(1)
    pool.allocate(ReservationHolder(9), 2)
    for used, held in ((6, 8), (9, 11), (6, 8), (3, 5), (0, 5), (30, 20)):
        books.observe(used)
        assert pool.held == held, used
        pool.check_integrity()
    assert books.pinned == 0


def test_a_handoff_that_must_be_consumed_takes_what_room_there_is() -> None:
    pool = BlockPool(4)
    books = Books(pool, 4, 60.0, SystemClock())
    books.begin(1, 12)
    books.begin_anyway(2, 12)
    assert (pool.held, pool.available) == (4, 0)
    books.begin_anyway(3, 12)
    books.end(2)
    assert pool.held == 3


def test_statistics_forgive_what_is_missing() -> None:
    assert read_iteration({}).used == 0
    assert read_iteration('{"kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 9}}').total == 9
    assert read_iteration({"kvCacheStats": None, "iterLatencyMS": 5.0}).seconds == 0.005
    with pytest.raises(ValueError):
        read_iteration(None)
    assert IterationStatistics().p99_s == 0.0


# the end


class Llm:
    def __init__(self, wait: asyncio.Event | None = None, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error

    def shutdown(self) -> None:
        import time

        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error


async def test_a_shutdown_is_bounded() -> None:
    exits: list[int] = []
    assert await end(Llm(), 10.0, lambda: exits.append(1))  # type: ignore[arg-type]
    assert not await end(Llm(seconds=1.0), 0.05, lambda: exits.append(1))  # type: ignore[arg-type]
    await until(lambda: exits == [1])
    assert not await end(Llm(error=RuntimeError("dead rank")), 10.0, lambda: exits.append(1))  # type: ignore[arg-type]
