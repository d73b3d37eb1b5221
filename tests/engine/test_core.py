"""The step loop with a fake runner: what is reported, who holds blocks until when, how runs end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from schemas.errors import ContextLengthExceeded, HeadraceError, InvalidRequest, UnsupportedParameter
from schemas.job import Choice, Sampling, Tier
from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.engine.protocol import RunSpec
from services.engine.runner import Failed, Outcome
from services.engine.scheduler import Step
from services.kv.holders import RunHolder
from services.kv.pool import LedgerError, PoolExhausted
from tests.engine.fakes import CONTEXT, EOS, VOCAB, Rig, count_up, first, spec
from tests.waiting import PATIENCE_S, until

# one run, from its prompt to its end


async def test_local_prefill_goes_on_to_decode_until_max_tokens() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, range(10, 20)), then_decode=True)
        await rig.ended(1)
        assert rig.tokens(1) == [20, 21, 22, 23, 24]
        assert [output.finish for output in rig.outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert rig.ends[1].state is State.FINISHED
        assert rig.pool.held == 0


async def test_prefill_alone_keeps_the_blocks_for_the_handoff() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, range(10, 20)))
        await until(lambda: rig.outputs)
        (report,) = [report for report in rig.reports if report.tokens]
        assert list(report.prefilled) == [1]
        assert rig.tokens(1) == [20]
        assert rig.holds(1) == 3
        assert not rig.ends
        rig.engine.cancel(1)  # it left the engine: the worker's to release
        assert rig.holds(1) == 3
        rig.pool.release(RunHolder(1))


async def test_a_choice_that_ends_with_its_first_token_is_not_handed_off() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, max_tokens=1))
        await rig.ended(1)
        assert not any(report.prefilled for report in rig.reports)
        assert rig.pool.held == 0


async def test_a_resumed_choice_counts_on() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, (1, 2), generated=(3, 4), max_tokens=4), then_decode=True)
        await rig.ended(1)
        assert [(output.index, output.token) for output in rig.outputs] == [(2, 5), (3, 6)]


async def test_decode_joins_with_its_first_token_which_is_not_reported_again() -> None:
    async with Rig() as rig:
        rig.pool.allocate(RunHolder(1), 2)
        rig.engine.decode(spec(1, range(1, 9)), first(9), cached_tokens=4, compute_s=0.5)
        await rig.ended(1)
        assert [(output.index, output.token) for output in rig.outputs] == [(1, 10), (2, 11), (3, 12), (4, 13)]
        assert [chunk.start for chunks in rig.runner.steps for chunk in chunks] == [8, 9, 10, 11]
        assert rig.outputs[0].cached_tokens == 4
        assert rig.outputs[-1].compute_s == pytest.approx(0.5 + 4 * 0.01)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({"max_tokens": 9}, [97, 98, EOS], FinishReason.STOP),
        ({"max_tokens": 9, "stop_token_ids": (98,)}, [97, 98], FinishReason.STOP),
        ({"max_tokens": 5, "ignore_eos": True}, [97, 98, EOS, 0, 1], FinishReason.LENGTH),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (0,)}, [97, 98, EOS, 0], FinishReason.STOP),
        ({"max_tokens": 5, "min_tokens": 3}, [97, 98, EOS, 0, 1], FinishReason.LENGTH),
        ({"max_tokens": 9, "min_tokens": 2}, [97, 98, EOS], FinishReason.STOP),
    ],
)
async def test_how_a_choice_ends(sampling: dict[str, Any], tokens: list[int], reason: FinishReason) -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, (95, 96), **sampling), then_decode=True)
        await rig.ended(1)
        assert rig.tokens(1) == tokens
        assert rig.outputs[-1].finish is reason


async def test_the_end_of_the_context_ends_a_choice() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, [1] * (CONTEXT - 2), max_tokens=50), then_decode=True)
        await rig.ended(1)
        assert len(rig.tokens(1)) == 2
        assert rig.outputs[-1].finish is FinishReason.LENGTH


async def test_a_long_prompt_is_chunked_beside_a_running_decode() -> None:
    async with Rig(paused=True, max_tokens=8) as rig:
        rig.engine.prefill(spec(1, max_tokens=12), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.prefill(spec(2, range(1, 31)), then_decode=True)
        rig.runner.open.set()
        await rig.ended(1, 2)
        mixed = [[chunk.count for chunk in chunks] for chunks in rig.runner.steps[1:5]]
        assert mixed == [[1, 8], [1, 8], [1, 8], [1, 6]]
        assert rig.tokens(2) == [31, 32, 33, 34, 35]


async def test_a_short_prompt_that_comes_behind_a_long_one_waits_for_the_step_in_progress() -> None:
    async with Rig(paused=True, max_tokens=8) as rig:
        rig.engine.prefill(spec(1, [1] * 60, max_tokens=1))
        await until(lambda: rig.runner.in_step)
        rig.engine.prefill(spec(2, [1] * 4, max_tokens=1))
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert [(chunk.sequence.run, chunk.count) for chunk in rig.runner.steps[1]] == [(2, 4), (1, 4)]
        assert [output.run for output in rig.outputs] == [2, 1]


# admission


def _bad(**changes: Any) -> RunSpec:
    fields = {"run": 1, "prompt": (1, 2), "choices": (Choice(index=0),), "sampling": Sampling(seed=1, max_tokens=5)}
    return RunSpec(**fields | changes)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (_bad(choices=(Choice(index=0), Choice(index=1))), UnsupportedParameter),
        (_bad(prompt=(1, VOCAB)), InvalidRequest),
        (_bad(prompt=(1,) * CONTEXT), ContextLengthExceeded),
    ],
)
async def test_what_an_engine_cannot_compute_is_refused_and_takes_no_block(wrong: RunSpec, error: type[HeadraceError]) -> None:
    async with Rig(n=False) as rig:
        with pytest.raises(error):
            rig.engine.prefill(wrong, then_decode=True)
        assert rig.pool.held == 0
        rig.pool.allocate(RunHolder(1), 20)
        with pytest.raises(error):
            rig.engine.decode(wrong, first(3), cached_tokens=0, compute_s=0.0)
        assert rig.holds(1) == 20
        rig.pool.release(RunHolder(1))


async def test_a_run_is_taken_once() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(spec(1))
        with pytest.raises(LedgerError):
            rig.engine.prefill(spec(1))


async def test_decode_without_its_blocks_is_refused() -> None:
    async with Rig() as rig:
        with pytest.raises(LedgerError):
            rig.engine.decode(spec(1, range(1, 9)), first(9), cached_tokens=0, compute_s=0.0)


async def test_reserved_blocks_are_used_first() -> None:
    async with Rig(blocks=4, paused=True) as rig:
        reserved = rig.pool.allocate(RunHolder(1), 2)
        rig.engine.prefill(spec(1, range(1, 13)), then_decode=True)
        assert rig.pool.blocks(RunHolder(1))[:2] == tuple(reserved)
        assert rig.holds(1) == 4


async def test_a_full_pool_refuses_and_changes_nothing() -> None:
    async with Rig(blocks=4, paused=True) as rig:
        rig.pool.allocate(RunHolder(1), 2)
        with pytest.raises(PoolExhausted):
            rig.engine.prefill(spec(1, range(1, 20)), then_decode=True)
        assert rig.holds(1) == 2
        rig.pool.release(RunHolder(1))


# memory


async def test_growth_preempts_the_last_of_the_lowest_tier() -> None:
    async with Rig(blocks=6) as rig:
        rig.runner.open.clear()
        for run, tier in ((1, Tier.FREE), (2, Tier.FREE), (3, Tier.ENTERPRISE)):
            rig.engine.prefill(spec(run, [run * 20] * 5, tier=tier, max_tokens=12), then_decode=True)
        rig.runner.open.set()
        await rig.ended(1, 2, 3)
        assert [rig.ends[run].state for run in (1, 2, 3)] == [State.RETRY, State.RETRY, State.FINISHED]
        assert {rig.ends[run].reason for run in (1, 2)} == {"preempted"}
        assert [len(rig.tokens(run)) for run in (1, 2, 3)] == [8, 4, 12]
        assert rig.pool.held == 0


async def test_a_run_alone_that_outgrows_the_pool_ends_as_retry() -> None:
    async with Rig(blocks=3) as rig:
        rig.engine.prefill(spec(1, [1] * 9, max_tokens=20), then_decode=True)
        await rig.ended(1)
        assert (rig.ends[1].state, rig.ends[1].reason) == (State.RETRY, "preempted")
        assert len(rig.tokens(1)) == 4
        assert rig.pool.held == 0


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


async def test_stats() -> None:
    async with Rig(paused=True, max_tokens=4) as rig:
        rig.engine.prefill(spec(1, [1] * 8, max_tokens=3), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.prefill(spec(2, [1] * 6, max_tokens=3), then_decode=True)
        stats = rig.engine.stats()
        assert (stats.queued, stats.queued_tokens, stats.running, stats.steps) == (1, 6, 1, 0)
        rig.runner.open.set()
        await rig.ended(1, 2)
        stats = rig.engine.stats()
        assert (stats.queued, stats.running, stats.steps) == (0, 0, len(rig.runner.steps))
        assert stats.step_p99_s == pytest.approx(0.01)
        assert stats.rates.decode_step_s == pytest.approx(0.01)
        assert stats.rates.prefill_tokens_s > 0


async def test_an_enterprise_prompt_overtakes_one_that_is_half_computed() -> None:
    """That one waits, with what it has: it counts as queued, and its backlog as what makes way."""
    async with Rig(paused=True, max_tokens=4) as rig:
        rig.engine.prefill(spec(1, [1] * 12))
        await until(lambda: rig.runner.in_step)
        rig.engine.prefill(spec(2, [1] * 8, tier=Tier.ENTERPRISE))
        stats = rig.engine.stats()
        assert (stats.queued_tokens, stats.backlog, stats.yielding, stats.yielding_queued) == (8, 20, 12, 0)
        rig.runner.open.set()
        rig.runner.open.clear()  # the step in progress ends, and the next one begins
        await until(lambda: len(rig.runner.steps) == 2)
        stats = rig.engine.stats()
        assert (stats.queued, stats.queued_tokens, stats.yielding_queued, stats.running) == (1, 8, 1, 1)
        rig.runner.open.set()
        await until(lambda: len(rig.outputs) == 2)
        assert [output.run for output in rig.outputs] == [2, 1]
        for run in (1, 2):
            rig.pool.release(RunHolder(run))


async def test_how_long_the_step_in_progress_takes() -> None:
    async with Rig(paused=True) as rig:
        assert rig.engine.stats().in_step_s == 0.0
        rig.engine.prefill(spec(1))
        await until(lambda: rig.runner.in_step)
        rig.runner.clock.advance(3.0)
        assert rig.engine.stats().in_step_s == pytest.approx(3.0)
        rig.runner.open.set()
        await until(lambda: not rig.engine.stats().running)
        assert rig.engine.stats().in_step_s == 0.0


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
