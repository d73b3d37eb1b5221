"""A detached job that another edge began: who has it now? Its owner is asked to speak to us from now on.

Owns nothing. Invariant: when this says that nobody has the job, no router will place an earlier attempt of it either.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from schemas.errors import Disconnected, HeadraceError
from schemas.reply import Digest
from services.edge.jobs.active import ActiveJob
from services.edge.jobs.canceller import Canceller
from services.edge.jobs.inbox import Inbox
from services.edge.jobs.timing import Timing
from services.edge.jobs.wire import Wire
from services.telemetry.logs import fields

_log = logging.getLogger("headrace.edge")


class Rejoin:
    def __init__(self, wire: Wire, inbox: Inbox, canceller: Canceller, timing: Timing) -> None:
        self._wire = wire
        self._inbox = inbox
        self._canceller = canceller
        self._timing = timing

    async def run(self, job: ActiveJob) -> bool:
        """True: the current attempt has an owner. False: the next one may begin.

        Its caller bounds it while our own connection is down.
        """
        tries = 0
        while tries < self._timing.rejoin_tries:
            try:
                digest = await self._wire.take_over(job, self._timing.rejoin_s)
                if self._joined(job, digest):
                    _log.info("adopted", extra=fields(job=job.id, owner=digest.process))
                    return True
            except Disconnected:
                tries -= 1
            except HeadraceError as error:  # nobody listens (it may be between two workers), or somebody who stands still
                _log.debug("no owner of an adopted job answers: %s", error)
            tries += 1
            await asyncio.sleep(self._timing.rejoin_s / 2)
        _log.info("adopted, nobody owns it", extra=fields(job=job.id))
        if not job.owned:
            await self._canceller.cancel(job)  # an earlier attempt may wait in the queue
        job.joining = 0
        job.next_attempt()
        return False

    async def settled(self, job: ActiveJob) -> None:
        """Once nobody is asked any more: the job is to be stopped, and whoever computes it has to be known to be told."""
        if not job.joining:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timing.cancel_s):
                await self.run(job)

    def _joined(self, job: ActiveJob, digest: Digest) -> bool:
        known, control = job.joining, self._wire.subjects.control(digest.process)
        for entry in digest.runs:
            if entry.job != job.id:
                continue
            if entry.attempt < known:  # a leftover of an attempt that its edge had given up
                self._wire.cancel_run(control, entry.run, job.id)
                continue
            job.rejoin(entry.attempt, known=entry.attempt == known)
            job.joining = 0
            job.admitted = True
            self._inbox.on_position(digest, control)
            return True
        return False
