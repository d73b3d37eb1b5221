"""1,000 jobs while everything fails at random, and some meet several faults: what was allocated is released, nothing is left."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import httpx
import pytest
from nats.aio.msg import Msg

from schemas.codec import decode
from schemas.job import LANES, Job
from tests.chaos.monitor import subscriptions
from tests.chaos.processes import NATS, back, descriptors, kill, pid, process_id, send, stop_for
from tests.chaos.streams import Answer, Question, ask, clients, questions, ready, undisturbed, until
from tests.chaos.tap import tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import Operator, operator
from tests.e2e.running import Up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEED = 4
JOBS = 1000
AT_ONCE = 40
SHORT, LONG = (5, 60), (250, 350)
"""Tokens. A long one takes 6 s when nothing happens, and meets several faults."""
WORKERS = ("p1", "p2", "d1", "d2")
EVERYBODY = (*WORKERS, "r1", "r2", "e1")
KINDS = {"p": "prefill", "d": "decode", "r": "router", "e": "edge"}
PACED = {
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.02",
    "HEADRACE_WORKER__KV_BLOCKS": "120",  # few: some runs are preempted too
    "HEADRACE_EDGE__QUEUE_DEADLINE_S": "200",  # faults come as fast on a slow machine, where jobs wait for long behind them
    "HEADRACE_EDGE__FIRST_TOKEN_DEADLINE_S": "200",
}
FAULTS = ("kill", "kill", "two", "in a row", "in a row", "drain", "stop", "router", "nats")
EXCUSED = {"internal_error", "request_quarantined", "queue_expired"}
"""What a job may hear that met three deaths, or waited too long behind all that."""


async def test_a_thousand_jobs(scripted_stack: StartScripted) -> None:
    up = scripted_stack("--prefill", "2", "--decode", "2", "--router", "2", **PACED)
    random = Random(SEED)
    asked = [Question(number, random.randrange(*(LONG if random.random() < 0.1 else SHORT))) for number in range(JOBS)]
    for _ in range(2):
        await undisturbed(up.url, questions(200, 20))  # so many that both routers use the queue
    before = await _left_behind(up)
    ends: Counter[str] = Counter()
    over = asyncio.Event()
    faults = asyncio.create_task(_faults(up, random, over))
    work = iter(asked)
    async with tap(up) as bus:
        submits = await bus.all_of("hr.submit.*")
        async with clients(up.url) as client, asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(_client(client, work, random, ends))
    over.set()
    done = await faults
    hit = Counter(_deaths(submits).values())
    print(f"\n{dict(ends)} under {dict(done)}; jobs by how many of their owners died: {dict(hit)}")
    assert max(hit) > 1, "no job lost two owners"
    assert ends.total() == JOBS
    assert not set(ends) - {"finished", "gave up"} - EXCUSED, ends
    assert ends["finished"] + ends["gave up"] > JOBS * 0.98
    for name in (*EVERYBODY, NATS):
        await until(lambda name=name: bool(pid(up, name)), 30.0)  # type: ignore[misc]
    await ready(up.url)
    async with operator(up) as op:
        assert len(await op.until(lambda found: len(found) == len(WORKERS), 30.0)) == len(WORKERS)
        await op.assert_clean(20.0)
        await _let_in(op)
    await undisturbed(up.url, [Question(JOBS + number, 20) for number in range(32)])  # none that may be in quarantine
    await _settles(up, before)


async def _client(client: httpx.AsyncClient, work: Iterator[Question], random: Random, ends: Counter[str]) -> None:
    """Asks one after another; every eighth hangs up somewhere in between."""
    for question in work:
        asking = asyncio.create_task(ask(client, question))
        if random.random() < 1 / 8:
            await asyncio.wait({asking}, timeout=random.uniform(0.0, 0.6))
            if not asking.done():
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking
                ends["gave up"] += 1
                continue
        answer = await asking
        while answer.status == 503:  # what it may hear while NATS is away, or no router is there
            await asyncio.sleep(0.2)
            answer = await ask(client, question)
        ends[_end(question, answer)] += 1


def _end(question: Question, answer: Answer) -> str:
    if answer.error is not None:
        return str(answer.error["code"])
    return "finished" if answer.whole and answer.tokens == question.max_tokens else "broken"


async def _faults(up: Up, random: Random, over: asyncio.Event) -> Counter[str]:
    """One after another, and now and then two at a time, until the jobs are done: each kind before any comes again."""
    done: Counter[str] = Counter()
    left: list[str] = []
    while not over.is_set():
        left = left or random.sample(FAULTS, len(FAULTS))
        kind = left.pop()
        done[kind] += 1
        if kind == "kill":
            await _gone_and_back(up, random.choice(WORKERS), signal.SIGKILL)
        elif kind == "two":
            await asyncio.gather(*(_gone_and_back(up, name, signal.SIGKILL) for name in random.sample(WORKERS, 2)))
        elif kind == "in a row":  # what went over to the other one loses that too
            for name in random.sample(("d1", "d2"), 2):
                await _gone_and_back(up, name, signal.SIGKILL)
                await asyncio.sleep(1.0)  # it has gone over by then, also on a slow machine
        elif kind == "drain":
            await _gone_and_back(up, random.choice(WORKERS), signal.SIGTERM)
        elif kind == "stop":
            await stop_for(up, random.choice(WORKERS), random.choice((0.5, 4.0)))
        elif kind == "router":
            await _gone_and_back(up, random.choice(("r1", "r2")), signal.SIGKILL)
        else:
            await back(up, NATS, kill(up, NATS))
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0.2, 1.5)):
                await over.wait()
    return done


async def _gone_and_back(up: Up, name: str, number: signal.Signals) -> None:
    await back(up, name, send(up, name, number), 60.0)


async def _let_in(op: Operator) -> None:
    """Until each router would place a job of any lane at once: what it promised to those it turned away ends with the trouble."""
    deadline = asyncio.get_running_loop().time() + 10
    asked = [(f"hr.admin.router.{router}.explain", lane) for router in await op.several("router", 2) for lane in range(LANES)]
    while asked:
        said = [await op.ask(subject, model="tiny", tokens=10, lane=lane) for subject, lane in asked]
        asked = [one for one, answer in zip(asked, said, strict=True) if answer["outcome"] != "placed"]
        assert asyncio.get_running_loop().time() < deadline, [answer for answer in said if answer["outcome"] != "placed"][:2]
        await asyncio.sleep(0.1)


def _deaths(submits: list[Msg]) -> dict[str, int]:
    """How many owners each job lost."""
    deaths: dict[str, int] = {}
    for msg in submits:
        job = decode(msg.data, Job)
        deaths[job.job] = max(job.deaths, deaths.get(job.job, 0))
    return deaths


async def _left_behind(up: Up) -> tuple[dict[str, int], ...]:
    """Subscriptions, descriptors and tasks of every process, by name."""
    return await subscriptions(up), {name: descriptors(pid(up, name)) for name in EVERYBODY}, await _tasks(up)


async def _tasks(up: Up) -> dict[str, int]:
    async with operator(up) as op:
        subjects = {name: f"hr.admin.{KINDS[name[0]]}.{process_id(up, name)}.status" for name in EVERYBODY}
        return {name: (await op.ask(subject))["tasks"] for name, subject in subjects.items()}


async def _settles(up: Up, before: tuple[dict[str, int], ...]) -> None:
    """Until nothing is held that was not before. A client's connection ends a moment after its answer."""
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        now = await _left_behind(up)
        kinds = zip(("subscriptions", "descriptors", "tasks"), now, before, strict=True)
        more = [(kind, name, has[name], had[name]) for kind, has, had in kinds for name in had if has[name] > had[name]]
        if not more:
            return
        assert asyncio.get_running_loop().time() < deadline, f"now and before: {more}"
