"""Rows of detached jobs: one holder, each token once, the end once, kept for a while."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from schemas.errors import StoreUnavailable
from schemas.job import pack_ids, unpack_ids
from schemas.reply import FinishReason, Logprob
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import ATTEMPTS, SqlJobStore
from services.edge.store.records import (
    Checkpoint,
    Chunk,
    Data,
    End,
    Facts,
    JobState,
    Progress,
    Retention,
    Standing,
    StoredJob,
)
from services.edge.store.tables import detached_jobs, detached_tokens
from tests.waiting import PATIENCE_S

JOB, OTHER = "a" * 32, "b" * 32
E1, E2, E3 = "e1-0k3v9x00abcde", "e2-0k3v9x00abcde", "e3-0k3v9x00abcde"
LEASE_S = 15.0
LAPSED = -1.0


def chunk(first: int, *tokens: int, choice: int = 0, finish: FinishReason | None = None) -> Chunk:
    return Chunk(choice, first, Data(tokens=pack_ids(tokens), finish=finish))


def told(found: Progress | StoredJob, choice: int = 0) -> list[int]:
    """The tokens of one choice; what overlaps must agree."""
    by_index: dict[int, int] = {}
    for one in found.chunks:
        if one.choice == choice:
            for offset, token in enumerate(unpack_ids(one.data.tokens)):
                assert by_index.setdefault(one.first + offset, token) == token
    return [by_index[index] for index in sorted(by_index)]


async def create(store: SqlJobStore, job: str = JOB, *, lease_s: float = LEASE_S) -> None:
    await store.create(job, "t", b"request", E1, lease_s)


async def say(store: SqlJobStore, *chunks: Chunk, edge: str = E1, end: End | None = None, facts: Facts | None = None) -> Standing:
    one = Checkpoint(JOB, facts or Facts(), chunks, end)
    return (await store.checkpoint(edge, [one], LEASE_S)).standings[JOB]


async def test_a_job_from_its_first_token_to_its_end(store: SqlJobStore) -> None:
    await create(store)
    created = await store.get(JOB, "t")
    assert created is not None
    assert (created.state, created.request, created.edge, created.facts) == (JobState.RUNNING, b"request", E1, Facts())
    assert 0 <= created.age < 60
    facts = Facts(attempt=2, deaths=1, owner="d1-0k3v9x00abcde", owned=True, weights="w", cached_tokens=3)
    assert await say(store, chunk(0, 5, 6), chunk(0, 9, choice=1), facts=facts) is Standing.HELD
    assert await say(store, chunk(2, 7, finish=FinishReason.STOP), end=End(JobState.FINISHED), facts=facts) is Standing.HELD
    found = await store.read(JOB, {0: 0, 1: 0})
    assert found is not None
    assert (found.state, told(found), told(found, 1), found.cached_tokens) == (JobState.FINISHED, [5, 6, 7], [9], 3)
    assert found.chunks[1].data.finish is FinishReason.STOP
    ended = await store.get(JOB, "t")
    assert ended is not None
    assert ended.facts == facts


async def test_a_reader_gets_what_it_has_not(store: SqlJobStore) -> None:
    await create(store)
    for first in range(0, 100, 10):
        await say(store, chunk(first, *range(first, first + 10)))
    found = await store.read(JOB, {0: 55})
    assert found is not None
    assert told(found) == list(range(50, 100))
    nothing = await store.read(JOB, {})
    assert nothing is not None
    assert not nothing.chunks
    assert await store.read(OTHER, {0: 0}) is None


async def test_logprobs_and_an_error_come_back(store: SqlJobStore) -> None:
    await create(store)
    logprobs = (Logprob(token=5, logprob=-0.5, top=((5, -0.5), (6, -1.5))),)
    await say(store, Chunk(0, 0, Data(tokens=pack_ids([5]), logprobs=logprobs)))
    await say(store, end=End(JobState.FAILED, "deadline_exceeded", "too late"))
    found = await store.read(JOB, {0: 0})
    assert found is not None
    assert found.chunks[0].data.logprobs == logprobs
    assert found.failure is not None
    assert (found.failure.status, found.failure.message) == (504, "too late")


async def test_a_checkpoint_may_be_repeated_and_may_have_grown(store: SqlJobStore) -> None:
    """When a commit's answer was lost, the same tokens come again, and more with them."""
    await create(store)
    await say(store, chunk(0, 1, 2))
    await say(store, chunk(0, 1, 2, 3, 4))
    await say(store, chunk(4, 5), end=End(JobState.FINISHED))
    await say(store, chunk(4, 5), end=End(JobState.FINISHED))
    found = await store.read(JOB, {0: 0})
    assert found is not None
    assert told(found) == [1, 2, 3, 4, 5]


async def test_what_was_written_twice_takes_room_once(database: Database, store: SqlJobStore) -> None:
    """Or what others still read would have to go for it."""
    await create(store)
    for end in (None, None, End(JobState.FINISHED), End(JobState.FINISHED)):
        await say(store, chunk(0, *range(100)), chunk(0, *range(50), choice=1), end=end)
    async with database.read() as connection:
        rows = (await connection.scalars(sa.select(detached_tokens.c.data))).all()
        size = (await connection.execute(sa.select(detached_jobs.c.size))).scalar_one()
    assert size == sum(len(row) for row in rows) > 600


async def test_only_its_holder_writes(store: SqlJobStore) -> None:
    await create(store)
    await say(store, chunk(0, 1))
    assert await say(store, chunk(1, 66), edge=E2, end=End(JobState.FAILED)) is Standing.TAKEN
    assert (await store.checkpoint(E1, [Checkpoint(OTHER, Facts())], LEASE_S)).standings == {OTHER: Standing.DELETED}
    found = await store.read(JOB, {0: 0})
    assert found is not None
    assert (found.state, told(found)) == (JobState.RUNNING, [1])


async def test_a_lapsed_job_is_adopted_with_all_it_has(store: SqlJobStore) -> None:
    await create(store, lease_s=LAPSED)
    assert await store.adopt(E2, [], LEASE_S, 10)
    await say(store, chunk(0, 1, 2), edge=E2, facts=Facts(2, 1002, owned=True))
    assert not await store.adopt(E3, [], LEASE_S, 10)
    await store.checkpoint(E2, [Checkpoint(JOB, Facts(2, 1002, owned=True), release=True)], LEASE_S)
    (adopted,) = await store.adopt(E3, [], LEASE_S, 10)
    assert (adopted.edge, told(adopted)) == (E3, [1, 2])
    assert adopted.facts == Facts(2, 1002 + ATTEMPTS, owned=True)
    assert await say(store, edge=E2) is Standing.TAKEN


async def test_of_two_that_race_one_wins(store: SqlJobStore) -> None:
    names = [f"{number:032x}" for number in range(20)]
    for name in names:
        await create(store, name, lease_s=LAPSED)
    edges = [E2, E3] * 4
    taken = await asyncio.gather(*(store.adopt(edge, [], LEASE_S, 7) for edge in edges))
    won = [(row.job, edge) for rows, edge in zip(taken, edges, strict=True) for row in rows]
    assert len(won) >= 7, "whoever was first got all that it asked for"
    assert sorted(job for job, _ in won) == sorted({job for job, _ in won})
    for job, edge in won:
        row = await store.get(job, "t")
        assert row is not None
        assert row.edge == edge


async def test_the_jobs_of_a_dead_edge_need_not_lapse(store: SqlJobStore) -> None:
    await create(store)
    assert not await store.adopt(E2, [E3], LEASE_S, 10)
    assert [row.job for row in await store.adopt(E2, [E1], LEASE_S, 10)] == [JOB]
    assert not await store.adopt(E3, [E1], LEASE_S, 10)


async def test_what_ended_is_not_adopted(store: SqlJobStore) -> None:
    await create(store)
    await say(store, end=End(JobState.CANCELLED))
    assert not await store.adopt(E2, [E1], LEASE_S, 10)


async def test_a_cancel_and_a_deletion_reach_the_holder(store: SqlJobStore) -> None:
    await create(store)
    assert not await store.ask_cancel(JOB, "another tenant")
    assert await say(store) is Standing.HELD
    assert await store.ask_cancel(JOB, "t")
    assert await say(store, chunk(0, 1)) is Standing.CANCEL
    assert not await store.delete(JOB, "another tenant")
    assert await store.delete(JOB, "t")
    assert await say(store) is Standing.DELETED
    assert await store.get(JOB, "t") is None
    assert not await store.ask_cancel(JOB, "t")


async def test_a_job_is_its_tenants(store: SqlJobStore) -> None:
    await create(store)
    assert await store.get(JOB, "another tenant") is None


async def _tokens_left(database: Database) -> int:
    async with database.read() as connection:
        return int((await connection.execute(sa.select(sa.func.count()).select_from(detached_tokens))).scalar_one())


async def test_old_tokens_go_first_and_the_job_is_remembered(database: Database, store: SqlJobStore) -> None:
    await create(store)
    await create(store, OTHER)
    await say(store, chunk(0, 1), end=End(JobState.FINISHED))
    assert not (await store.sweep(Retention())).expired
    assert (await store.sweep(Retention(keep_s=-1))).expired == 1  # the other one still runs
    found = await store.get(JOB, "t")
    assert found is not None
    assert (found.state, found.request) == (JobState.EXPIRED, b"")
    assert await _tokens_left(database) == 0
    assert (await store.sweep(Retention(remember_s=-1))).forgotten == 1
    assert await store.get(JOB, "t") is None
    assert await store.get(OTHER, "t") is not None


async def test_what_takes_too_much_room_goes_oldest_first(store: SqlJobStore) -> None:
    names = [f"{number:032x}" for number in range(5)]
    for name in names:
        await create(store, name)
        ended = Checkpoint(name, Facts(), (chunk(0, *range(1000)),), End(JobState.FINISHED))
        await store.checkpoint(E1, [ended], LEASE_S)
    assert (await store.sweep(Retention(keep_bytes=9000))).expired == 3
    rows = [await store.get(name, "t") for name in names]
    assert [row.state for row in rows if row] == [JobState.EXPIRED] * 3 + [JobState.FINISHED] * 2


async def test_a_busy_database_is_told_within_the_deadline(sqlite: Database, tmp_path: Path) -> None:
    store, other = SqlJobStore(sqlite), Database(database_url("", tmp_path))
    await create(store)
    async with other.write(PATIENCE_S):
        with pytest.raises(StoreUnavailable):
            await say(store, chunk(0, 1))
        assert await store.get(JOB, "t") is not None  # who only reads does not wait
    await other.close()
    assert await say(store, chunk(0, 1)) is Standing.HELD
