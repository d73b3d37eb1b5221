"""Detached jobs while their database is locked, away or lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from schemas.errors import NotFound, StoreUnavailable
from schemas.reply import FinishReason
from tests.edge.detached.rig import TENANT, Pair, attach, begun, long_draft, pair, read_all
from tests.waiting import PATIENCE_S, until


async def test_a_database_that_is_locked_costs_no_token(edges: Pair) -> None:
    """For longer than the lease: the edge that holds the job lets it go, and takes it again when it can be written."""
    job, owner = await begun(edges)
    reader = await attach(edges.first, job)
    assert await reader.next(PATIENCE_S)
    async with edges.second.database.write(2 * PATIENCE_S):
        owner.go_on(4)
        assert [token for delta in await reader.next(PATIENCE_S) for token in delta.tokens] == [103, 104, 105, 106]
        await until(lambda: len(edges.first.detached) == 0)
        with pytest.raises(StoreUnavailable):
            await edges.first.detached.submit(long_draft(), TENANT)
    await until(lambda: len(edges.first.detached) + len(edges.second.detached) == 1)
    owner.go_on(1, FinishReason.STOP)
    assert await read_all(await attach(edges.first, job)) == (owner.tokens(), FinishReason.STOP)
    assert not owner.cancels
    assert len(edges.cluster.jobs) == 1


async def test_what_ended_while_the_database_was_away_is_written_later(edges: Pair) -> None:
    job, owner = await begun(edges)
    async with edges.second.database.write(PATIENCE_S):
        owner.go_on(4, FinishReason.STOP)
        await asyncio.sleep(2.5)  # longer than the lease
    assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
    assert len(edges.cluster.jobs) == 1


async def test_a_deleted_database_is_made_anew(tmp_path: Path) -> None:
    """What was in it is gone, so its jobs are stopped; new ones are taken, and edges see one another's again."""
    async with pair(tmp_path) as edges:
        lost, owner = await begun(edges)
        for file in os.listdir(tmp_path):
            (tmp_path / file).unlink(missing_ok=True)  # SQLite may remove its own
        await until(lambda: owner.cancels)
        await until(lambda: edges.first.detached.ready and edges.second.detached.ready)
        with pytest.raises(NotFound):
            await attach(edges.first, lost)
        job, owner = await begun(edges)
        owner.go_on(4, FinishReason.STOP)
        assert await read_all(await attach(edges.second, job)) == (owner.tokens(), FinishReason.STOP)
