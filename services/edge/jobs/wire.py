"""What an edge says to owners and routers about its jobs. Owns nothing but the bus and the names.

Everything here is repeated by its caller, so a connection that is down loses nothing: it is simply not said this time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from schemas.codec import Message
from schemas.control import CancelJob, Control, Position, Verb
from schemas.errors import Disconnected
from schemas.reply import Digest
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import ask, send
from services.edge.jobs.active import ActiveJob

_log = logging.getLogger("headrace.edge")


class Wire:
    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self.reply_to = subjects.reply(bus.process)
        self.cancel_inbox = f"_INBOX.edge.{bus.process}.cancel.ack"
        """One token deeper than the bus's own inbox, so that the two do not hear each other's answers."""

    def cancel_run(self, control: str, run: int, job: str, choices: tuple[int, ...] | None = None) -> None:
        """To the process behind the subject `control`: stop this run, or these choices of it."""
        message = Control(run=run, job=job, verb=Verb.CANCEL, choices=choices, reply_to=self.reply_to, edge=self.bus.process)
        self._say(control, message)

    def cancel_owners(self, job: ActiveJob, choices: tuple[int, ...] | None = None) -> None:
        """To everybody who may compute the adopted run."""
        for process in job.cancel_targets:
            self.cancel_run(self.subjects.control(process), job.run, job.id, choices)

    def replay(self, job: ActiveJob, positions: Iterable[Position]) -> None:
        """To the owner, or whoever else has it: repeat what is missing."""
        control = Control(
            run=job.run, job=job.id, verb=Verb.REPLAY, positions=tuple(positions), reply_to=self.reply_to, edge=self.bus.process
        )
        for process in job.replay_targets:
            self._say(self.subjects.control(process), control)

    def hold(self, job: ActiveJob) -> None:
        """To everybody who may compute this detached job: we still hold it."""
        message = Control(run=job.run, job=job.id, verb=Verb.ATTACH, edge=self.bus.process)
        for process in job.cancel_targets:
            self._say(self.subjects.control(process), message)

    async def take_over(self, job: ActiveJob, timeout: float) -> Digest:
        """From whoever owns this detached job: where it stands. What is missing comes to us, and all that follows.

        Raises `NoResponders`, `RequestTimeout`, `Disconnected`, `UnreadableMessage`.
        """
        message = Control(
            run=0, job=job.id, verb=Verb.ATTACH, positions=job.tokens.unfinished(), reply_to=self.reply_to, edge=self.bus.process
        )
        return await ask(self.bus, self.subjects.attach(job.id), message, Digest, timeout=timeout)

    def cancel_job(self, job: ActiveJob) -> None:
        """To all routers: nobody owns this job yet, and nobody shall. Each answers to `cancel_inbox`."""
        draft = job.draft
        message = CancelJob(
            job=job.id,
            attempt=job.attempt,
            model=draft.model,
            tier=draft.tier,
            lane=draft.lane,
            remember_s=draft.limits.queue_s,
        )
        self._say(self.subjects.cancel(), message, self.cancel_inbox)

    def _say(self, subject: str, message: Message, reply: str = "") -> None:
        try:
            send(self.bus, subject, message, reply=reply)
        except Disconnected:
            _log.debug("not said while the bus is down: %s", subject)
