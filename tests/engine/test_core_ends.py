"""How runs of the engine's core end early: cancels, rows and steps that fail, the end of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from schemas.lifecycle import State
from services.engine.runner import Failed, Outcome
from services.engine.scheduler import Step
from tests.engine.fakes import Rig, count_up, spec
from tests.waiting import PATIENCE_S, until

# cancel


async def test_a_waiting_run_is_cancelled_at_once() -> None:
    async with Rig(paused=True, max_tokens=4) as rig:
        rig.engine.prefill(spec(1, [1] * 8))
        await until(lambda: rig.runner.in_step)
        rig.engine.prefill(spec(2))
        assert rig.holds(2) == 1
        rig.engine.cancel(2)
        assert rig.holds(2) == 0
        rig.runner.open.set()
        await rig.ended(2)
        assert rig.ends[2].state is State.CANCELLED


async def test_a_cancel_while_the_engine_idles_is_reported() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1))
        rig.engine.cancel(1)  # before the loop saw it
        await rig.ended(1)
        assert rig.runner.steps == []


async def test_a_run_in_the_step_keeps_its_blocks_until_the_step_is_over() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(spec(1), then_decode=True)
        rig.engine.prefill(spec(2), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.cancel(1)
        rig.engine.cancel(1)
        assert rig.holds(1) == 1
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert rig.ends[1].state is State.CANCELLED
        assert rig.tokens(1) == []
        assert len(rig.tokens(2)) == 5


async def test_a_step_that_stopped_ends_the_cancelled_and_repeats_the_others() -> None:
    async with Rig(paused=True) as rig:
        answers: list[Sequence[Outcome] | None] = [None]
        rig.runner.answer = lambda step: answers.pop() if answers else count_up(step)
        rig.engine.prefill(spec(1), then_decode=True)
        rig.engine.prefill(spec(2), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.cancel(1)
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert rig.tokens(1) == []
        assert rig.tokens(2) == [4, 5, 6, 7, 8]


async def test_an_unknown_run_is_cancelled_in_silence() -> None:
    async with Rig() as rig:
        rig.engine.cancel(77)
        rig.engine.prefill(spec(1), then_decode=True)
        await rig.ended(1)
        assert rig.ends.keys() == {1}


# failures


def failing(run: int) -> Any:
    def answer(step: Step) -> list[Outcome]:
        outcomes = count_up(step)
        return [Failed("bad row") if c.sequence.run == run else o for c, o in zip(step.chunks, outcomes, strict=True)]

    return answer


async def test_a_row_fails_alone() -> None:
    async with Rig(paused=True) as rig:
        rig.runner.answer = failing(2)
        for run in (1, 2, 3):
            rig.engine.prefill(spec(run), then_decode=True)
        rig.runner.open.set()
        await rig.ended(1, 2, 3)
        assert (rig.ends[2].state, rig.ends[2].reason) == (State.FAILED, "bad row")
        assert rig.tokens(1) == rig.tokens(3) == [4, 5, 6, 7, 8]


def broken(_: Step) -> list[Outcome]:
    raise RuntimeError("boom")


@pytest.mark.parametrize("answer", [broken, lambda _: []], ids=["raises", "answers too little"])
async def test_a_broken_step_fails_its_runs_and_the_engine_goes_on(answer: Any) -> None:
    async with Rig(paused=True) as rig:
        rig.runner.answer = answer
        rig.engine.prefill(spec(1), then_decode=True)
        rig.engine.prefill(spec(2), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.cancel(2)
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert (rig.ends[1].state, rig.ends[1].reason) == (State.FAILED, "engine_error")
        assert rig.ends[2].state is State.CANCELLED
        rig.runner.answer = count_up
        rig.engine.prefill(spec(3), then_decode=True)
        await rig.ended(3)
        assert rig.ends[3].state is State.FINISHED


async def test_a_loop_that_dies_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def listener(_: object) -> None:
        raise RuntimeError("the worker's bug")

    async with Rig(on_step=listener) as rig:
        rig.engine.prefill(spec(1), then_decode=True)
        await until(lambda: [record for record in caplog.records if record.levelno == logging.CRITICAL])


# the end of the engine


async def test_stop_reports_nothing_and_frees_blocks_only_when_nobody_computes() -> None:
    rig = Rig(paused=True)
    closing = asyncio.Event()

    async def close() -> None:
        assert rig.holds(1) == 1
        await closing.wait()

    rig.runner.close = close  # type: ignore[method-assign]
    rig.engine.prefill(spec(1))
    await until(lambda: rig.runner.in_step)
    stopping = asyncio.create_task(rig.engine.stop())
    await asyncio.sleep(0)
    assert rig.runner.steps[0][0].sequence.cancelled
    closing.set()
    async with asyncio.timeout(PATIENCE_S):
        await stopping
        await rig.engine.stop()
    assert rig.reports == []
    assert rig.pool.held == 0


async def test_a_paused_engine_begins_no_step_and_still_lets_go_of_what_is_cancelled() -> None:
    async with Rig(paused=True) as rig:
        for run in (1, 2):
            rig.engine.prefill(spec(run, max_tokens=20), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.pause()
        rig.runner.open.set()
        await until(lambda: not rig.runner.in_step)
        steps = len(rig.runner.steps)
        rig.engine.cancel(1)
        await rig.ended(1)
        assert len(rig.runner.steps) == steps
        assert not rig.holds(1)
        assert rig.holds(2)
        rig.engine.resume()
        await rig.ended(2)
        assert len(rig.tokens(2)) == 20
