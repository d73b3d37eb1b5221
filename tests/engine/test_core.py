"""The step loop with a fake runner: one run from its prompt to its end, and what the engine says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.job import Tier
from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.kv.holders import RunHolder
from tests.engine.fakes import CONTEXT, EOS, Rig, first, spec
from tests.waiting import until


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
        rig.engine.prefill(spec(2, [1] * 6, max_tokens=1))
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert [(chunk.sequence.run, chunk.count) for chunk in rig.runner.steps[1]] == [(2, 6), (1, 2)]
        assert [output.run for output in rig.outputs] == [2, 1]


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
