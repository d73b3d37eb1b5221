"""Seconds of compute: what steps took is shared out to runs by tokens, so that it can be billed."""

from __future__ import annotations

import asyncio

import pytest

from schemas.lifecycle import State
from services.kv.holders import RunHolder
from tests.engine.fakes import Rig, first, several, spec
from tests.waiting import until


def charged(rig: Rig) -> dict[int, float]:
    """What the last word about each run says."""
    return {output.run: max(each.compute_s for each in rig.outputs if each.run == output.run) for output in rig.outputs}


def taken(rig: Rig) -> float:
    """By all steps together."""
    return len(rig.runner.steps) * rig.runner.seconds


async def test_nothing_is_charged_twice_and_nothing_is_lost() -> None:
    """Prompts of several chunks, choices of one run, runs that begin and end beside others."""
    async with Rig() as rig:
        rig.engine.prefill(spec(1, range(10), max_tokens=7), then_decode=True)
        rig.engine.prefill(several(2, range(20), (), (), (), max_tokens=4), then_decode=True)
        await until(lambda: rig.outputs)
        rig.engine.prefill(spec(3, range(5), max_tokens=1), then_decode=True)
        await rig.ended(1, 2, 3)
        assert sum(charged(rig).values()) == pytest.approx(taken(rig))
        assert min(charged(rig).values()) > 0


async def test_a_step_is_shared_out_by_tokens() -> None:
    async with Rig(paused=True) as rig:
        for run in (1, 2):
            rig.pool.allocate(RunHolder(run), 3)
        rig.engine.decode(spec(1, range(5), max_tokens=2), first(9), cached_tokens=0, compute_s=0.0)
        rig.engine.decode(spec(2, range(5), max_tokens=2), first(9), cached_tokens=0, compute_s=0.25)
        rig.engine.prefill(spec(3, range(3), max_tokens=1), then_decode=True)
        rig.runner.open.set()
        await rig.ended(1, 2, 3)
        steps = [{chunk.sequence.run: chunk.count for chunk in chunks} for chunks in rig.runner.steps]
        for run, brought in ((1, 0.0), (2, 0.25), (3, 0.0)):
            shares = sum(rig.runner.seconds * step.get(run, 0) / sum(step.values()) for step in steps)
            assert charged(rig)[run] == pytest.approx(brought + shares)


async def test_who_is_cancelled_takes_its_share_of_the_step_along() -> None:
    async with Rig(paused=True) as rig:
        for run in (1, 2):
            rig.engine.prefill(spec(run, range(4), max_tokens=1), then_decode=True)
        await until(lambda: rig.runner.in_step)
        together = {chunk.sequence.run for chunk in rig.runner.steps[-1]} == {1, 2}
        rig.engine.cancel(2)
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert rig.ends[2].state is State.CANCELLED
        assert charged(rig) == {1: pytest.approx(rig.runner.seconds / (1 + together))}


async def test_a_handoff_brings_what_prefill_took() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, range(10)))
        await until(lambda: any(report.prefilled for report in rig.reports))
        await asyncio.sleep(0)
        (totals,) = [report.prefilled[1] for report in rig.reports if report.prefilled]
        assert totals.compute_s == pytest.approx(taken(rig))
        rig.pool.release(RunHolder(1))
