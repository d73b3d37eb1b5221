"""SIGTERM, or the operator's drain, under load: a service takes nothing new, what runs finishes or moves, none fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import pytest

from tests.chaos.processes import NATS, back, kill, process_id, send
from tests.chaos.streams import (
    Answer,
    Progress,
    Question,
    ask,
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TWO_OF_ALL = ("--prefill", "2", "--decode", "2", "--router", "2", "--edge", "2")
PACED = {"HEADRACE_SCRIPTED__DECODE_STEP_S": "0.03", "HEADRACE_WORKER__DRAIN_TIMEOUT_S": "0.5"}
"""Runs take longer than workers wait for them, so they must move."""
EVERYBODY = ("p1", "d1", "r1", "p2", "d2", "r2", "e1", "e2")


@pytest.mark.parametrize("name", ["p1", "d1", "r1", "e1"])
async def test_sigterm(scripted_stack: StartScripted, name: str) -> None:
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    asked = questions(32, 80)
    expected = await undisturbed(up.url, asked)

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        await back(up, name, send(up, name, signal.SIGTERM))

    assert_same(await ask_all(up.url, asked, fault), expected)
    assert f"{name}: exit code 0" in up.said
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
    """Under a steady load, all processes one after another, NATS last. A client refused by one edge asks the other, as a
    balancer does for it; an answer that has begun must end."""
    up = scripted_stack(*TWO_OF_ALL, **PACED)
    await ready(up.url)
    edges = [up.url, f"http://127.0.0.1:{up.port + 1}"]
    asked = questions(24, 60)
    expected = {question.number: answer.said for question, answer in zip(asked, await undisturbed(up.url, asked), strict=True)}
    over = asyncio.Event()
    answers: list[tuple[Question, Answer]] = []
    async with asyncio.TaskGroup() as group:
        for question in asked:
            group.create_task(_over_and_over(edges, question, over, answers))
        try:
            for name in EVERYBODY:
                await until(_more_than(answers, len(answers) + 8), 60.0)
                await back(up, name, send(up, name, signal.SIGTERM))
                for edge in edges:
                    await ready(edge)
            await back(up, NATS, kill(up, NATS))
            for edge in edges:
                await ready(edge)
            await until(_more_than(answers, len(answers) + 24), 60.0)
        finally:
            over.set()
    wrong = [(question.number, answer) for question, answer in answers if answer.said != expected[question.number]]
    assert not wrong, f"{len(wrong)} of {len(answers)}: {wrong[:2]}"
    assert len(answers) > 100
    async with operator(up) as op:
        await op.assert_clean()


def _more_than(answers: list[tuple[Question, Answer]], count: int) -> Callable[[], bool]:
    return lambda: len(answers) > count


async def _over_and_over(edges: list[str], question: Question, over: asyncio.Event, into: list[tuple[Question, Answer]]) -> None:
    async with clients(edges[0]) as first, clients(edges[1]) as second:
        while not over.is_set():
            for client in (first, second) if question.number % 2 else (second, first):
                answer = await ask(client, question)
                if answer.status == 200:
                    into.append((question, answer))
                    break
                if answer.pieces or answer.status not in (0, 503):
                    into.append((question, answer))  # it had begun: this is a failure
                    break
            else:
                await asyncio.sleep(0.05)


async def _idle(op: Operator, subject: str) -> None:
    deadline = time.monotonic() + 20.0
    while (await op.ask(subject))["runs"]:
        assert time.monotonic() < deadline
