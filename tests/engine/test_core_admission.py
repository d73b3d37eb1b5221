"""What the engine's core refuses, whose blocks it uses, and who makes way when they run out."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import ContextLengthExceeded, HeadraceError, InvalidRequest, UnsupportedParameter
from schemas.job import Choice, Sampling, Tier
from schemas.lifecycle import State
from services.engine.protocol import RunSpec
from services.kv.holders import RunHolder
from services.kv.pool import LedgerError, PoolExhausted
from tests.engine.fakes import CONTEXT, VOCAB, Rig, first, spec

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
