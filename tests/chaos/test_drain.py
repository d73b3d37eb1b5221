"""SIGTERM, or the operator's drain, under load: a service takes nothing new, what runs finishes or moves, none fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence

import pytest

from tests.chaos.load import steady
from tests.chaos.processes import NATS, back, process_id, send
from tests.chaos.streams import (
    Answer,
    Progress,
    ask_all,
    assert_same,
    clients,
    not_ready,
    questions,
    ready,
    undisturbed,
    until,
)
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_ALL = ("--prefill", "2", "--decode", "2", "--router", "2", "--edge", "2")
PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03", "HEADRACE_WORKER__DRAIN_TIMEOUT_S": "0.5"}
"""Runs take longer than workers wait for them, so they must move."""
LOAD_S = 60.0
EVERYBODY = ("p1", "d1", "r1", "p2", "d2", "r2", "e1", "e2")


@pytest.mark.parametrize("name", ["p1", "d1", "r1", "e1"])
async def test_sigterm(scripted_stack: StartScripted, name: str) -> None:
    """faults.md, gateway: SIGTERM under load -> streams finish within the drain."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked = questions(32, 80)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        await back(up, name, send(up, name, signal.SIGTERM))

    assert_same(await ask_all(up.url, asked, fault), expected)
    assert f"{name}: exit code 0" in up.output
    async with operator(up) as op:
        await op.assert_clean()


async def test_sigterm_of_one_of_two_edges(scripted_stack: StartScripted) -> None:
    """faults.md, gateway: SIGTERM under load. Readiness is false while its streams go on to their end, new work is sent away,
    and the peer answers all of it."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked, later, peer = questions(16, 300), questions(16, 40, first=16), f"http://127.0.0.1:{up.port + 1}"
    expected, undisturbed_later = await undisturbed(up.url, asked), await undisturbed(peer, later)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        before = send(up, "e1", signal.SIGTERM)
        async with clients(up.url) as client:
            while (probe := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
        assert probe.status_code == 503
        so_far = sum(progress.pieces)
        await until(lambda: sum(progress.pieces) > so_far, 60.0, lambda: "its streams do not go on")
        [refused] = await ask_all(up.url, later[:1])
        assert (refused.status, refused.retry_after) == (503, "1")
        assert_same(await ask_all(peer, later), undisturbed_later)
        await back(up, "e1", before)

    assert_same(await ask_all(up.url, asked, fault), expected)
    await ready(up.url)
    async with operator(up) as op:
        await op.assert_clean()


async def test_a_worker_that_an_operator_drains(scripted_stack: StartScripted) -> None:
    """It finishes what it has, gets nothing new, and takes work again when told to."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked = questions(32, 60)
    expected = await undisturbed(up.url, asked)
    async with operator(up) as op:
        admin = f"hr.admin.decode.{process_id(up, 'd1')}"

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            assert (await op.ask(f"{admin}.drain"))["state"]["draining"]
            await _idle(op, f"{admin}.status")

        assert_same(await ask_all(up.url, asked, fault), expected)
        busy = asyncio.create_task(ask_all(up.url, asked))
        while not busy.done():
            assert (await op.ask(f"{admin}.status"))["runs"] == 0
        assert_same(busy.result(), expected)
        assert not (await op.ask(f"{admin}.undrain"))["state"].get("draining")
        await _may_be_placed_on(op, process_id(up, "d1"))
        again = asyncio.create_task(ask_all(up.url, asked))
        while not (await op.ask(f"{admin}.status"))["runs"]:
            assert not again.done()
        assert_same(await again, expected)


async def test_a_router_that_an_operator_drains(scripted_stack: StartScripted) -> None:
    """Another one does its work. With the last one drained nobody is ready, what runs goes on; undrained it is as before."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked = questions(32, 60)
    expected = await undisturbed(up.url, asked)
    async with operator(up) as op:
        first, second = (f"hr.admin.router.{process_id(up, name)}" for name in ("r1", "r2"))

        async def one(progress: Progress) -> None:
            await progress.everybody_has(3)
            assert (await op.ask(f"{first}.drain"))["draining"]

        async def both(progress: Progress) -> None:
            await progress.everybody_has(3)
            assert (await op.ask(f"{second}.drain"))["draining"]
            await not_ready(up.url)

        assert_same(await ask_all(up.url, asked, one), expected)
        assert_same(await ask_all(up.url, questions(32, 150), both), await _slow(up, op, (first, second)))
        assert_same(await ask_all(up.url, asked), expected)


async def _slow(up: Up, op: Operator, routers: Sequence[str]) -> list[Answer]:
    """What `questions(32, 150)` are, after all that: `routers` take work again."""
    for router in routers:
        assert not (await op.ask(f"{router}.undrain"))["draining"]
    await ready(up.url)
    return await undisturbed(up.url, questions(32, 150))


async def test_an_edge_that_an_operator_drains(scripted_stack: StartScripted) -> None:
    """Not ready, and new requests are sent away; those that run end as ever; undrained it serves again."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked = questions(16, 60)
    expected = await undisturbed(up.url, asked)
    async with operator(up) as op:
        admin = f"hr.admin.edge.{process_id(up, 'e1')}"

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            assert (await op.ask(f"{admin}.drain"))["draining"]
            await not_ready(up.url)
            [refused] = await ask_all(up.url, asked[:1])
            assert (refused.status, refused.retry_after) == (503, "1")
            assert_same(await ask_all(f"http://127.0.0.1:{up.port + 1}", asked), expected)

        assert_same(await ask_all(up.url, asked, fault), expected)
        assert not (await op.ask(f"{admin}.undrain"))["draining"]
        await ready(up.url)
        assert_same(await ask_all(up.url, asked), expected)


async def test_a_rolling_restart_of_everything(scripted_stack: StartScripted) -> None:
    """A minute of load, all processes one after another, NATS last, and again from the first."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    edges = [up.url, f"http://127.0.0.1:{up.port + 1}"]
    asked = questions(24, 60)
    expected = {question.number: answer.said for question, answer in zip(asked, await undisturbed(up.url, asked), strict=True)}
    started, rounds = time.monotonic(), 0
    async with steady(edges, asked) as load:
        while not rounds or time.monotonic() - started < LOAD_S:
            rounds += 1
            for name in (*EVERYBODY, NATS):
                await load.more(8)
                await back(up, name, send(up, name, signal.SIGKILL if name == NATS else signal.SIGTERM))
                for edge in edges:
                    await ready(edge)
        await load.more(24)
    load.assert_none_failed(expected)
    print(f"\n{len(load.answers)} answers, {rounds} rounds in {time.monotonic() - started:.0f} s")
    assert len(load.answers) > 100
    async with operator(up) as op:
        await op.assert_clean()


async def _may_be_placed_on(op: Operator, process: str) -> None:
    """Until each router has heard that this worker does not drain."""
    for router in await op.several("router", 2):
        async with asyncio.timeout(PATIENCE_S):
            while not await _sees_working(op, router, process):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.02)


async def _sees_working(op: Operator, router: str, process: str) -> bool:
    workers = (await op.ask(f"hr.admin.router.{router}.status"))["models"]["tiny"]["workers"]
    return any(worker["process"] == process and not worker.get("draining") for worker in workers)


async def _idle(op: Operator, subject: str) -> None:
    deadline = time.monotonic() + 60.0
    while (await op.ask(subject))["runs"]:
        assert time.monotonic() < deadline
