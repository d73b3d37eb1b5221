"""What workers and routers say is not trusted: whatever numbers are in it, a job goes on and ends, and a Retry-After is one."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from schemas.codec import decode
from schemas.errors import UnreadableMessage
from schemas.job import Job
from schemas.lifecycle import State
from schemas.reply import Digest, FinishReason, Frames, Reply
from schemas.state import QueueReport
from tests.edge.cluster import DECODE, EDGE, MODEL, ROUTER, Cluster, collect, draft
from tests.schemas.numbers import EXTREMES, numbers, with_number
from tests.schemas.samples import every
from tests.waiting import until

RUN = 5
pytestmark = pytest.mark.usefixtures("nothing_left_over")
SAMPLES = {type(message): message for message in every()}


def of_run(job: Job) -> tuple[Frames, Digest]:
    """What the owner of `job` may say, every field filled in."""
    frames, digest = SAMPLES[Frames], SAMPLES[Digest]
    assert isinstance(frames, Frames)
    assert isinstance(digest, Digest)
    mine = {"run": RUN, "job": job.job, "attempt": job.attempt}
    return (
        replace(
            frames,
            process=DECODE,
            frames=(replace(frames.frames[0], **mine, choice=0, finish=None),),
            events=(replace(frames.events[0], **mine, state=State.DECODING),),
        ),
        replace(digest, process=DECODE, runs=(replace(digest.runs[0], **mine),), stalled=False),
    )


def unreadable(data: bytes, kind: type) -> bool:
    try:
        decode(data, kind)
    except UnreadableMessage:
        return True
    return False


async def test_strange_numbers_of_a_worker_are_refused_and_counted_or_do_no_harm(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.then = cluster.accept(RUN)
    handle = cluster.edge.start(draft())
    whole = asyncio.create_task(collect(handle))
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    refused = 0
    for message in of_run(job):
        for path in numbers(message):
            for number in EXTREMES:
                data = with_number(message, path, number)
                refused += unreadable(data, Reply)  # type: ignore[arg-type]
                cluster.bus.publish(cluster.subjects.reply(EDGE), data, reply=cluster.subjects.control(DECODE))
    await until(lambda: sum(cluster.edge._refusals.refused.values()) == refused)
    assert refused > 100

    def say_all() -> bool:
        """Whatever attempt the edge has come to meanwhile."""
        cluster.tokens(DECODE, cluster.jobs[-1][1], RUN, 0, list(range(100)), finish=FinishReason.LENGTH)
        return whole.done()

    await until(say_all)
    tokens, finish = await whole
    assert (len(tokens), finish) == (100, FinishReason.LENGTH)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_strange_numbers_of_a_router_make_no_retry_after_that_is_none(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    sample = SAMPLES[QueueReport]
    assert isinstance(sample, QueueReport)
    report, heard = replace(sample, router=ROUTER, model=MODEL), cluster.edge.models
    after = with_number(replace(report, model="after"), ("drain_rate",), 1.0)
    for path in numbers(report):
        for number in EXTREMES:
            cluster.bus.publish(cluster.subjects.queue(MODEL), with_number(report, path, number))
            cluster.bus.publish(cluster.subjects.queue("after"), after)
            await until(lambda: heard.waiting("after"))
            heard._reports.pop((ROUTER, "after"))
            assert 1.0 <= heard.retry_after(MODEL) <= 120.0, (path, number)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
