"""Detached jobs with real processes: edges die, the database is locked, and every reader gets each token once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import nats
import pytest

from schemas.codec import encode
from schemas.state import Cause, Death
from tests.chaos.detached import EdgeProcess, Reading, edges
from tests.chaos.processes import back, kill
from tests.chaos.streams import until
from tests.chaos.workers import Workers
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STACK = ("--prefill", "2", "--decode", "2")
NAMES = ("p1", "p2", "d1", "d2")
STEP = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03"}
SLOW = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.08"}
"""480 tokens, near to all that the tiny model's context holds, take longer than a lease and than a worker waits for an edge."""
LONG = 480
LEASE_S = 15.0
UNATTENDED_S = 30.0


async def undisturbed(edge: EdgeProcess, numbers: Sequence[int], max_tokens: int) -> list[list[int]]:
    """What the jobs say when nothing fails."""
    jobs = [await edge.submit(number, max_tokens) for number in numbers]
    readings = await asyncio.gather(*(edge.read(job, Reading()) for job in jobs))
    assert [len(reading.tokens) for reading in readings] == [max_tokens] * len(numbers), [(r.error, r.finish) for r in readings]
    return [reading.tokens for reading in readings]


async def all_have(readings: Sequence[Reading], tokens: int) -> None:
    def so_far() -> str:
        return f"tokens so far: {[len(one.tokens) for one in readings]}, errors: {[one.error for one in readings]}"

    await until(lambda: all(len(reading.tokens) >= tokens for reading in readings), 30.0, so_far)


async def attempts(edge: EdgeProcess, jobs: Sequence[str]) -> list[int]:
    """Of each job; a worker that was not let run for 300 ms takes no handoff, and one more begins."""
    return [row["attempt"] for row in await asyncio.gather(*(edge.ask("find", job=job) for job in jobs))]


def assert_whole(readings: Sequence[Reading], expected: Sequence[Sequence[int]]) -> None:
    assert [(reading.error, reading.finish) for reading in readings] == [("", "length")] * len(readings)
    assert [reading.tokens for reading in readings] == list(expected)


async def prove(up: Up, process: str) -> None:
    """As a supervisor that saw it exit."""
    password = json.loads((up.home / "nats" / "passwords.json").read_text())["supervisor"]
    client = await nats.connect(
        f"nats://127.0.0.1:{up.nats_port}", user="supervisor", password=password, inbox_prefix="_INBOX.supervisor"
    )
    await client.publish(f"hr.dead.{process}", encode(Death(process=process, cause=Cause.KILLED)))
    await client.close()


@pytest.mark.parametrize("proven", [True, False], ids=["proven", "silent"])
async def test_the_edge_that_holds_them_is_killed(scripted_stack: StartScripted, tmp_path: Path, proven: bool) -> None:
    """Two others race for its jobs; each goes on at one of them, as the same run, and reads like nothing had happened."""
    up, numbers = scripted_stack(*STACK, **(STEP if proven else SLOW)), range(16)
    tokens = 200 if proven else 300
    async with edges(up, tmp_path, "x1", "x2", "x3") as (first, second, third), operator(up) as op:
        jobs = [await first.submit(number, tokens) for number in numbers]
        elsewhere = [Reading() for _ in jobs]
        reading = [asyncio.create_task(second.read(job, into)) for job, into in zip(jobs, elsewhere, strict=True)]
        await all_have(elsewhere, 10)
        before = await attempts(second, jobs)
        await first.kill()
        if proven:
            await prove(up, first.id)
        await asyncio.gather(*reading)
        rows = [await third.ask("find", job=job) for job in jobs]
        assert {row["edge"] for row in rows} <= {second.id, third.id}
        assert [row["attempt"] for row in rows] == before, "their owners were found, nothing was computed twice"
        print("\nadopted", Counter(row["edge"][:2] for row in rows))
        again = await asyncio.gather(*(third.read(job, Reading()) for job in jobs))
        assert_whole(again, [reading.tokens for reading in elsewhere])
        assert_whole(elsewhere, await undisturbed(third, numbers, tokens))
        await op.assert_clean()


async def test_edge_and_worker_are_killed_together(scripted_stack: StartScripted, tmp_path: Path) -> None:
    """The tokens that no checkpoint had are computed again, and are the same."""
    up, numbers = scripted_stack(*STACK, **STEP), range(12)
    async with edges(up, tmp_path, "x1", "x2") as (first, second):
        expected = await undisturbed(second, numbers, 150)
        jobs = [await first.submit(number, 150) for number in numbers]
        readings = [Reading() for _ in jobs]
        reading = [asyncio.create_task(second.read(job, into)) for job, into in zip(jobs, readings, strict=True)]
        await all_have(readings, 10)
        await first.kill()
        before = kill(up, "d1")
        await prove(up, first.id)
        await asyncio.gather(*reading)
        assert_whole(readings, expected)
        await back(up, "d1", before)


async def test_an_edge_that_leaves_hands_over(scripted_stack: StartScripted, tmp_path: Path) -> None:
    up, numbers = scripted_stack(*STACK, **STEP), range(8)
    async with edges(up, tmp_path, "x1", "x2") as (first, second):
        jobs = [await first.submit(number, 150) for number in numbers]
        readings = [Reading() for _ in jobs]
        reading = [asyncio.create_task(second.read(job, into)) for job, into in zip(jobs, readings, strict=True)]
        await all_have(readings, 5)
        before = await attempts(second, jobs)
        await first.stop()
        await asyncio.gather(*reading)
        assert_whole(readings, await undisturbed(second, numbers, 150))
        assert await attempts(second, jobs) == before


async def test_every_edge_is_killed(scripted_stack: StartScripted, tmp_path: Path) -> None:
    """The runs outlive the silence of an edge, not that of all edges; a new edge finishes the jobs all the same."""
    up, numbers = scripted_stack(*STACK, **SLOW), range(6)
    async with edges(up, tmp_path, "x1", "x2") as (first, second), operator(up) as op:
        workers = Workers(op, up, NAMES)
        jobs = [await first.submit(number, LONG) for number in numbers]
        readings = [Reading() for _ in jobs]
        reading = [asyncio.create_task(first.read(job, into)) for job, into in zip(jobs, readings, strict=True)]
        await all_have(readings, 10)
        await asyncio.gather(first.kill(), second.kill(), *reading)
        killed = time.monotonic()
        took = await workers.idle_after(UNATTENDED_S + PATIENCE_S)
        print(f"\nidle {took:.1f} s after the last edge")
        assert took > 10.0, "a dead edge alone must not end them"
        async with edges(up, tmp_path, "x3") as (third,):
            await until(lambda: time.monotonic() > killed + LEASE_S, LEASE_S)
            for job in jobs[1:]:
                await third.ask("cancel", job=job)
            last = await third.read(jobs[0], Reading())
            assert_whole([last], await undisturbed(third, [0], LONG))
            assert last.tokens[: len(readings[0].tokens)] == readings[0].tokens
            assert (await third.ask("find", job=jobs[0]))["attempt"] > 1
            await op.assert_clean()


async def test_readers_begin_where_they_like(scripted_stack: StartScripted, tmp_path: Path) -> None:
    up = scripted_stack(*STACK, **STEP)
    async with edges(up, tmp_path, "x1", "x2") as both:
        job = await both[0].submit(3, 120)
        whole = Reading()
        reading = asyncio.create_task(both[0].read(job, whole))
        await all_have([whole], 40)
        later = [await edge.read(job, Reading(), first) for edge in both for first in (0, 17, 39, 100)]
        await reading
        after = [await edge.read(job, Reading(), 60) for edge in both]
        for found, first in zip(later, (0, 17, 39, 100) * 2, strict=True):
            assert found.tokens == whole.tokens[first:]
        assert [found.tokens for found in after] == [whole.tokens[60:]] * 2


async def test_the_database_is_locked_for_5_s(scripted_stack: StartScripted, tmp_path: Path) -> None:
    """Who reads where the job is held notices nothing; the rest comes when it can be written again."""
    up, numbers = scripted_stack(*STACK, **STEP), range(4)
    async with edges(up, tmp_path, "x1", "x2") as (first, second):
        expected = await undisturbed(second, numbers, 400)
        jobs = [await first.submit(number, 400) for number in numbers]
        here, there = [Reading() for _ in jobs], [Reading() for _ in jobs]
        reading = [
            asyncio.create_task(edge.read(job, into))
            for edge, readings in ((first, here), (second, there))
            for job, into in zip(jobs, readings, strict=True)
        ]
        await all_have(here, 10)
        lock = sqlite3.connect(tmp_path / "edge.db", PATIENCE_S, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        had = [len(one.tokens) for one in here]
        await asyncio.sleep(5.0)  # the fault itself is a time
        assert all(len(one.tokens) > before + 5 for one, before in zip(here, had, strict=True)), (had, here)
        lock.execute("ROLLBACK")
        lock.close()
        await asyncio.gather(*reading)
        assert_whole(here, expected)
        assert_whole(there, expected)


async def test_cancelled_and_deleted_from_another_edge(scripted_stack: StartScripted, tmp_path: Path) -> None:
    up = scripted_stack(*STACK, **STEP)
    async with edges(up, tmp_path, "x1", "x2") as (first, second), operator(up) as op:
        workers = Workers(op, up, NAMES)
        cancelled, deleted = [await first.submit(number, LONG) for number in (1, 2)]
        readings = [Reading(), Reading()]
        reading = [asyncio.create_task(first.read(job, into)) for job, into in zip((cancelled, deleted), readings, strict=True)]
        await all_have(readings, 5)
        await second.ask("cancel", job=cancelled)
        await second.ask("delete", job=deleted)
        await workers.idle_after(PATIENCE_S)
        await asyncio.gather(*reading)
        assert [one.error for one in readings] == ["cancelled", "not_found"]
        assert (await second.ask("find", job=deleted))["error"] == "not_found"
        async with asyncio.timeout(PATIENCE_S):
            while (await second.ask("find", job=cancelled))["state"] != "cancelled":  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        await op.assert_clean()
