"""Digests: every 250 ms, to each edge that this worker serves, where its runs stand; ended ones for 10 s.

They are how an edge learns that the last message of a run was lost, or that nobody here knows its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from schemas.errors import BusError
from schemas.reply import Digest, DigestEntry
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.worker.parcels import parcels_of_digest
from services.worker.runs import Run, RunTable
from services.worker.stalls import StallWatch

EVERY_S = 0.25
KEEP_ENDED_S = 10.0


def digests(process: str, runs: RunTable, *, stalled: bool = False) -> Iterator[tuple[str, Digest]]:
    """The digest for each reply subject, in as many messages as the bus takes it."""
    entries: dict[str, list[DigestEntry]] = {}
    for run in runs:
        entries.setdefault(run.job.reply_to, []).append(entry(run))
    for run in runs.ended_within(KEEP_ENDED_S):
        entries.setdefault(run.job.reply_to, []).append(_of_ended(run))
    for reply_to, of_edge in entries.items():
        for place, parcel in enumerate(parcels_of_digest(of_edge)):
            yield reply_to, Digest(process=process, runs=parcel, stalled=stalled, continued=place > 0)


async def send_digests(bus: Bus, subjects: Subjects, runs: RunTable, stalls: StallWatch) -> None:
    """For as long as the worker lives. Nothing is sent while the bus is down."""
    control = subjects.control(bus.process)
    while True:
        await asyncio.sleep(EVERY_S)
        for reply_to, digest in digests(bus.process, runs, stalled=stalls.stalled):
            try:
                send(bus, reply_to, digest, reply=control)
            except BusError:
                continue


def entry(run: Run) -> DigestEntry:
    """Where a run stands."""
    last = tuple((choice, output.index) for choice, output in run.last.items())
    return DigestEntry(run=run.id, job=run.job.job, attempt=run.job.attempt, hop=run.hop, state=run.state, last=last)


def _of_ended(run: Run) -> DigestEntry:
    """Made once: it is said 40 times."""
    if run.end is None:
        run.end = entry(run)
    return run.end
