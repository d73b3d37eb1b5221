"""Preempted runs wait in the swap space and come back with the same KV, in order; nobody waits for ever.

The scripted engine's KV is a fingerprint of all tokens before, and all of it is checked before each step that reads it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from schemas.job import Tier
from schemas.lifecycle import State
from services.engine.protocol import RunSpec, StepReport
from services.engine.residency import LONGEST_S
from services.kv.holders import ReservationHolder, RunHolder
from services.kv.pool import PoolExhausted
from tests.engine.scripted import BLOCK, Scripted, job
from tests.waiting import until

COUNT = 40
ROOM = -(-(8 + COUNT) // BLOCK)
"""Blocks of a run that has all its tokens."""


def spec(run: int, *, tier: Tier = Tier.PAID, n: int = 1, length: int = 8, max_tokens: int = COUNT) -> RunSpec:
    """Each run has a prompt of its own."""
    asked = job(run, [20 + run] * length, *[()] * n, max_tokens=max_tokens, temperature=1.0, ignore_eos=True)
    return replace(asked, tier=tier)


async def alone(*specs: RunSpec) -> list[dict[int, list[int]]]:
    """What each gets when there is room enough."""
    async with Scripted(blocks=400) as engine:
        return [await engine.local(each) for each in specs]


def is_swapped(engine: Scripted) -> bool:
    return engine.engine.stats().swapped > 0


async def stop_at_a_swap(engine: Scripted) -> None:
    """The engine stands in a step, while a run is swapped."""
    engine.runner.stop_when = lambda: is_swapped(engine)
    await until(lambda: engine.runner.in_step and not engine.runner.open.is_set(), what="a step beside a swapped run")


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_preempted_comes_back_and_goes_on_with_the_same_tokens(cache: bool, n: int) -> None:
    specs = [spec(run, n=n, max_tokens=20) for run in range(4)]
    async with Scripted(blocks=12 * n, swap=100, cache=cache) as engine:
        for each in specs:
            engine.engine.prefill(each, then_decode=True)
        await engine.ended(*range(4))
        assert [engine.tokens(run) for run in range(4)] == await alone(*specs)
        assert sum(report.preemptions for report in engine.reports) >= 2
        assert engine.pool.held == engine.pool.swap.used == engine.pool.withheld == 0


async def test_without_room_in_the_swap_space_it_ends_as_retry() -> None:
    async with Scripted(blocks=ROOM + 2, swap=1) as engine:
        for run in (1, 2):
            engine.engine.prefill(spec(run), then_decode=True)
        await engine.ended(1, 2)
        assert (engine.end(1), engine.end(2)) == (State.FINISHED, State.RETRY)


async def test_the_highest_tier_and_the_oldest_come_back_first() -> None:
    """Four runs that grow to half the pool each."""
    tiers = [Tier.FREE, Tier.PAID, Tier.ENTERPRISE, Tier.PAID]
    async with Scripted(blocks=2 * ROOM - 4, swap=100) as engine:
        for run, tier in enumerate(tiers):
            engine.engine.prefill(spec(run, tier=tier), then_decode=True)
        await engine.ended(*range(4))
        order = [end.run for report in engine.reports for end in report.ended]
        assert order == [2, 1, 3, 0]
        assert {engine.end(run) for run in range(4)} == {State.FINISHED}


async def test_nobody_who_arrives_takes_what_a_swapped_run_waits_for() -> None:
    async with Scripted(blocks=ROOM + 2, swap=100) as engine:
        for run in (1, 2):
            engine.engine.prefill(spec(run), then_decode=True)
        await stop_at_a_swap(engine)
        engine.engine.cancel(1)
        with pytest.raises(PoolExhausted):
            engine.engine.prefill(spec(3), then_decode=True)
        with pytest.raises(PoolExhausted):
            engine.pool.allocate(ReservationHolder(4), 1)
        engine.runner.open.set()
        await engine.ended(2)
        assert engine.end(2) is State.FINISHED
        await engine.local(spec(5))


async def test_a_cancel_frees_the_swap_space_at_once() -> None:
    async with Scripted(blocks=3 * ROOM, swap=100) as engine:
        for run in (1, 2):
            engine.engine.prefill(spec(run, n=3), then_decode=True)
        await stop_at_a_swap(engine)
        used = engine.pool.swap.used
        engine.engine.cancel(2, [1])
        assert 0 < engine.pool.swap.used < used
        engine.engine.cancel(2)
        assert engine.pool.swap.used == 0
        engine.pool.check_integrity()
        engine.runner.open.set()
        await engine.ended(1, 2)
        assert (engine.end(1), engine.end(2)) == (State.FINISHED, State.CANCELLED)


@pytest.mark.parametrize("way", ["out", "back"])
async def test_a_cancel_on_the_way_takes_effect_when_the_copy_is_over(way: str) -> None:
    """Whatever is copied is not given to others before."""
    async with Scripted(blocks=ROOM + 2, swap=100) as engine:
        seen: list[int] = []
        read, write = engine.pool.read, engine.pool.write

        def cancel_in_the_middle() -> None:
            seen.append(engine.pool.held)
            if len(seen) == 2:
                engine.engine.cancel(2)
                assert engine.pool.held == seen[-1]

        def reading(block: int) -> bytes:
            if way == "out":
                cancel_in_the_middle()
            return read(block)

        def writing(block: int, content: bytes) -> None:
            if way == "back":
                cancel_in_the_middle()
            write(block, content)

        engine.pool.read, engine.pool.write = reading, writing  # type: ignore[method-assign]
        specs = [spec(run) for run in (1, 2)]
        for each in specs:
            engine.engine.prefill(each, then_decode=True)
        await engine.ended(1, 2)
        assert len(seen) > 2
        assert (engine.end(1), engine.end(2)) == (State.FINISHED, State.CANCELLED)
        assert [engine.tokens(1)] == await alone(specs[0])
        assert engine.pool.held == engine.pool.swap.used == 0


async def test_stopping_the_engine_forgets_what_is_swapped() -> None:
    engine = Scripted(blocks=ROOM + 2, swap=100)
    async with engine:
        for run in (1, 2):
            engine.engine.prefill(spec(run), then_decode=True)
        await stop_at_a_swap(engine)
        engine.runner.open.set()
    assert engine.pool.held == engine.pool.swap.used == 0


async def test_who_waits_too_long_is_sent_away() -> None:
    """A reservation keeps what the run needs."""
    async with Scripted(blocks=ROOM, swap=100) as engine:
        engine.pool.allocate(ReservationHolder(9), ROOM // 2)
        engine.engine.prefill(spec(1), then_decode=True)
        await until(lambda: is_swapped(engine))
        assert engine.engine.stats().running == 0
        engine.clock.advance(LONGEST_S)
        await engine.ended(1)
        assert engine.end(1) is State.RETRY
        assert engine.pool.swap.used == engine.pool.withheld == 0
        engine.pool.release(ReservationHolder(9))


async def test_it_comes_back_when_others_let_go_of_the_blocks() -> None:
    async with Scripted(blocks=ROOM, swap=100) as engine:
        engine.pool.allocate(ReservationHolder(9), ROOM // 2)
        engine.engine.prefill(spec(1), then_decode=True)
        await until(lambda: is_swapped(engine))
        engine.pool.release(ReservationHolder(9))
        await engine.ended(1)
        assert engine.end(1) is State.FINISHED


async def test_a_run_that_the_whole_pool_cannot_hold_ends_as_retry() -> None:
    async with Scripted(blocks=ROOM - 1, swap=100) as engine:
        engine.engine.prefill(spec(1), then_decode=True)
        await engine.ended(1)
        assert engine.end(1) is State.RETRY
        assert len(engine.tokens(1)[0]) == (ROOM - 1) * BLOCK - 8 + 1


async def test_what_the_cache_still_has_is_not_copied_back() -> None:
    async with Scripted(blocks=ROOM + 4, swap=100) as engine:
        written: list[int] = []
        write = engine.pool.write

        def writing(block: int, content: bytes) -> None:
            written.append(block)
            write(block, content)

        engine.pool.write = writing  # type: ignore[method-assign]
        for run in (1, 2):
            engine.engine.prefill(spec(run), then_decode=True)
        await stop_at_a_swap(engine)
        saved = engine.pool.swap.used
        engine.engine.cancel(1)  # before anything of the other was evicted
        engine.runner.open.set()
        await engine.ended(2)
        assert engine.end(2) is State.FINISHED
        assert len(written) < saved


async def test_two_runs_that_each_need_the_whole_pool_take_turns() -> None:
    async with Scripted(blocks=ROOM, swap=100) as engine:
        for run in (1, 2):
            engine.engine.prefill(spec(run), then_decode=True)
        await engine.ended(1, 2)
        assert {engine.end(1), engine.end(2)} == {State.FINISHED}
        assert sum(report.preemptions for report in engine.reports) == 1


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("seed", range(12))
async def test_no_livelock(seed: int, cache: bool) -> None:
    """Runs of all kinds arrive while others are preempted. Each ends, the first of all without ever giving up its blocks.

    However little room there is: a run that was swapped computes something before it is swapped again, and few are preempted for
    each token.
    """
    random = Random(seed)
    blocks = random.choice((14, 20, 40))
    arriving = [
        spec(
            run,
            tier=random.choice(list(Tier)),
            n=random.choice((1, 1, 2, 3)),
            length=random.randint(1, 20),
            max_tokens=random.randint(1, 30),
        )
        for run in range(20)
    ]
    first = replace(spec(50), tier=Tier.ENTERPRISE)

    def watch(report: StepReport) -> None:
        engine.pool.check_integrity()
        if not any(end.run == 50 for end in report.ended) and engine.tokens(50) and not engine.end(50):
            assert engine.pool.blocks(RunHolder(50)), "the first of all keeps its blocks"

    async with Scripted(blocks=blocks, swap=random.choice((0, 8, 100)), cache=cache, watch=watch) as engine:
        engine.engine.prefill(first, then_decode=True)
        waiting = list(arriving)
        async with asyncio.timeout(20):
            while waiting:
                try:
                    engine.engine.prefill(waiting[0], then_decode=True)
                    waiting.pop(0)
                except PoolExhausted:
                    if engine.pool.held == engine.pool.swap.used == 0:
                        waiting.pop(0)  # larger than the pool
                await asyncio.sleep(0)
        await engine.ended(50)
        assert engine.end(50) is State.FINISHED
        await until(lambda: engine.pool.held == engine.pool.swap.used == 0, what="the end of all")
        solo = dict(zip((each.run for each in arriving), await alone(*arriving), strict=True))
        for run, expected in solo.items():
            assert engine.end(run) in (State.FINISHED, State.RETRY, None)
            for choice, tokens in engine.tokens(run).items():
                assert tokens == expected[choice][: len(tokens)]
                assert engine.end(run) is State.RETRY or tokens == expected[choice]
        preemptions = sum(report.preemptions for report in engine.reports)
        assert preemptions <= len(arriving) + sum(len(report.tokens) for report in engine.reports) // BLOCK
