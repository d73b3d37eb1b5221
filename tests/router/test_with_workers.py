"""The router before real workers on the scripted engine: what it asks is what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from schemas.codec import encode
from schemas.errors import Unavailable
from schemas.job import Job
from schemas.lifecycle import State
from schemas.placement import Accepted, Queue, SubmitAnswer
from services.bus.memory_queue import MemoryWorkQueue
from services.bus.typed import Refusals, ask
from services.clock import SystemClock
from services.engine.scripted import Timing
from services.router.router import Router
from services.settings.settings import Settings
from tests.waiting import PATIENCE_S, until
from tests.worker.rig import Rig, rig

JOBS = 24


@asynccontextmanager
async def routed(timing: Timing) -> AsyncIterator[tuple[Rig, Router, MemoryWorkQueue]]:
    """A router that sees the rig's two workers."""
    queue = MemoryWorkQueue()
    async with rig(prefill=timing, decode=timing) as r:
        router = Router(r.router, queue, Settings(model="m"), SystemClock(), Random(2), Refusals())
        await router.listen()
        await router.join()
        for worker in (r.prefill, r.decode):
            worker.spawn(worker.beats.run(), "beats")
        await until(lambda: len(router.view.workers("m")) == 2)
        try:
            yield r, router, queue
        finally:
            await router.drain()


async def submit(r: Rig, queue: MemoryWorkQueue, job: Job) -> str:
    """What an edge does with the answer; says which it was."""
    answer = await ask(r.edge.bus, r.subjects.submit("m"), job, SubmitAnswer, timeout=PATIENCE_S)
    match answer:
        case Accepted():
            return "accepted"
        case Queue():
            await queue.put(r.subjects.job("m", job.tier, job.lane, job.job), encode(job), msg_id=job.job, ttl_s=30.0)
            return "queued"
    raise Unavailable(f"{answer}")


def finished(r: Rig) -> list[str]:
    return [event.job for event in r.edge.events if event.state is State.FINISHED]


async def test_one_job_end_to_end() -> None:
    async with routed(Timing()) as (r, _, queue):
        job = r.job(max_tokens=6)
        assert await submit(r, queue, job) == "accepted"
        await until(lambda: finished(r) == [job.job])
        await until(r.clean)


async def test_a_burst_beyond_credit_goes_through_the_queue_and_every_job_runs_once() -> None:
    async with routed(Timing(prefill_token_s=0.0005, decode_step_s=0.002)) as (r, _, queue):
        jobs = [r.job(max_tokens=6) for _ in range(JOBS)]
        ways = await asyncio.gather(*(submit(r, queue, job) for job in jobs))
        assert set(ways) == {"accepted", "queued"}
        await until(lambda: len(finished(r)) >= JOBS, timeout=20.0)
        assert sorted(finished(r)) == sorted(job.job for job in jobs)
        await until(r.clean)
        assert not await queue.waiting(r.subjects.jobs())
