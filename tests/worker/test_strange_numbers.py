"""What others say is not trusted: whatever numbers are in it, a worker takes the next job and ends it."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from schemas.codec import Message
from schemas.control import Control
from schemas.handoff import Handoff, OfferRequest
from schemas.kvevents import KvSnapshotRequest
from schemas.lifecycle import State
from schemas.placement import Accept, Lease, Placement
from schemas.state import EdgeBeat
from tests.router.harness import eventually
from tests.schemas.numbers import EXTREMES, numbers, with_number
from tests.schemas.samples import every
from tests.waiting import until
from tests.worker.rig import Rig, rig

pytestmark = pytest.mark.usefixtures("nothing_left_over")
SAMPLES = {type(message): message for message in every()}


def heard_by_workers(r: Rig) -> list[tuple[str, Message]]:
    """A message of each kind and where it goes, every field filled in."""
    prefill, decode = r.prefill.bus.process, r.decode.bus.process
    job, subjects = r.job(), r.subjects
    placement, handoff, beat = SAMPLES[Placement], SAMPLES[Handoff], SAMPLES[EdgeBeat]
    assert isinstance(placement, Placement)
    assert isinstance(handoff, Handoff)
    assert isinstance(beat, EdgeBeat)
    mine = replace(job, sampling=replace(placement.job.sampling, max_tokens=4, grammar=None), deaths=1)
    return [
        (subjects.prefill_submit(prefill), replace(placement, job=mine, decode=decode)),
        (subjects.decode_submit(decode), replace(placement, job=mine, decode="")),
        (subjects.decode_lease(decode), SAMPLES[Lease]),
        (subjects.decode_handoff(decode), replace(handoff, job=mine, prefill=prefill, kv_compat="k")),
        (subjects.decode_offer(decode), SAMPLES[OfferRequest]),
        (subjects.control(decode), SAMPLES[Control]),
        (subjects.control(prefill), SAMPLES[Control]),
        (subjects.kv_snapshot(prefill), SAMPLES[KvSnapshotRequest]),
        (subjects.edge_state(beat.process), beat),
    ]


async def may_reserve(r: Rig) -> bool:
    """Everything that was taken has ended: the last may be a job that computes alone."""
    return r.clean() and (await r.reserve(run=99, blocks=1)).results[0].ok


async def test_strange_numbers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as r:
        answers: list[bytes] = []
        inbox = r.router.new_inbox()
        await r.router.subscribe(inbox, lambda msg: answers.append(msg.data))
        for subject, message in heard_by_workers(r):
            for path in numbers(message):
                for number in EXTREMES:
                    r.router.publish(subject, with_number(message, path, number), reply=inbox)
        await eventually(lambda: may_reserve(r))
        run, answer = await r.submit(r.job())
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED
        await until(r.clean)
    assert answers
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
