"""Background responses: each a detached job, read from any edge, from any event on, as often as one likes.

Owns the readers that bring a response to its end although no client reads it. Invariants: the object and its events are made of
the job's tokens alone, so whichever edge makes them makes the same; which end is kept is decided by the database, once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from schemas.errors import Gone, HeadraceError, InternalError, NotFound, StoreUnavailable, UnreadableMessage
from services.edge.api.measure import Measure
from services.edge.api.served import Served
from services.edge.gate.meter import Reservation
from services.edge.gate.records import Bill
from services.edge.jobs.draft import Draft
from services.edge.jobs.handle import JobCancelled
from services.edge.responses.objects import RUNNING, Object, cancelled, failed
from services.edge.responses.onebyone import OneByOne, Reader
from services.edge.responses.prepare import Prepared, begin
from services.edge.responses.request import read_functions
from services.edge.responses.telling import Reading
from services.edge.responses.transcript import UNTOLD, Transcript, beyond
from services.edge.store.records import JobState, StoredJob
from services.edge.store.responses import PREFIX, Json, SqlResponseStore, StoredResponse
from services.telemetry.logs import fields

_LOOK_S = 1.0
_SETTLE_S = 10.0
_ROUND_S = 5.0
_SWEEP_EVERY = 120
"""Rounds."""
_MOST = 64
_log = logging.getLogger("headrace.edge")


class Detached(Protocol):
    """See `services.edge.detached.jobs`; the tests play it."""

    async def submit(self, draft: Draft, tenant: str, bill: Bill, over: Callable[[int], None]) -> str: ...

    async def undo(self, job: str, tenant: str) -> None: ...

    async def attach(self, job: str, tenant: str) -> Reader: ...

    async def find(self, job: str, tenant: str) -> StoredJob: ...

    async def cancel(self, job: str, tenant: str) -> None: ...

    async def delete(self, job: str, tenant: str) -> None: ...


class Background:
    """`keep_s`: how long responses are stored."""

    def __init__(self, served: Served, detached: Detached, store: SqlResponseStore, keep_s: float) -> None:
        self._served = served
        self._detached = detached
        self._store = store
        self._keep_s = keep_s
        self._following: dict[str, asyncio.Task[None]] = {}

    async def start(
        self,
        tenant: str,
        prepared: Prepared,
        make: Callable[[str], Object],
        items: list[Json],
        reservation: Reservation,
        measure: Measure,
    ) -> StoredResponse:
        """`make` makes the response's object of its id. Raises the `HeadraceError` that refused it: nothing is left of it."""
        draft = prepared.draft
        bill = reservation.bill(draft.model, draft.prompt_tokens, self._served.settings.price(draft.model))
        with reservation.undone_on_failure():
            job = await self._detached.submit(draft, tenant, bill, reservation.hand_over)
            stored = StoredResponse(make(PREFIX + job), items, running=True)
            await self._add(tenant, job, stored)
        self._following[stored.id] = asyncio.create_task(self._follow(stored, tenant, measure))
        return stored

    async def read(self, stored: StoredResponse, tenant: str, after: int = -1) -> Reading:
        """From the event after number `after` on. Raises `NotFound`, `Gone`, `StoreUnavailable`, `UnreadableMessage`."""
        return self._reading(stored, tenant, await self._detached.attach(_job(stored), tenant), after)

    async def must_reach(self, stored: StoredResponse, tenant: str, after: int) -> None:
        """Raises `InvalidRequest` for a response that ended before event number `after`; as `read`."""
        end = await self.refresh(stored, tenant)
        if end["status"] in RUNNING:
            return
        transcript = (await self._all(stored, tenant))[0].transcript
        transcript.begin(end)
        transcript.end(end)
        if after >= transcript.count:
            raise beyond(after, transcript.count)

    async def refresh(self, stored: StoredResponse, tenant: str) -> Object:
        """How it stands now. Raises `StoreUnavailable`, `UnreadableMessage`."""
        if not stored.running:
            return stored.object
        try:
            job = await self._detached.find(_job(stored), tenant)
        except NotFound as error:
            return await self._keep(tenant, failed(stored.object, (), error))
        if job.state is not JobState.RUNNING:
            return await self._settle(stored, tenant, job.state)
        return {**stored.object, "status": "in_progress" if job.facts.owned else "queued"}

    async def cancel(self, stored: StoredResponse, tenant: str) -> Object:
        """Raises `StoreUnavailable`, `UnreadableMessage`."""
        response = await self.refresh(stored, tenant)
        if response["status"] not in RUNNING:
            return response
        with suppress(NotFound):  # as good as cancelled
            await self._detached.cancel(_job(stored), tenant)
        return await self._keep(tenant, cancelled(stored.object))

    async def forget(self, stored: StoredResponse, tenant: str) -> None:
        """Its row is gone. Raises `StoreUnavailable`."""
        with suppress(NotFound):  # its time was over
            await self._detached.delete(_job(stored), tenant)

    async def run(self) -> None:
        """Until cancelled: end what no edge reads any more, and forget what is old."""
        turn = 0
        while True:
            await asyncio.sleep(self._served.random.uniform(0.5, 1.5) * _ROUND_S)
            turn += 1
            try:
                await self.look()
                if turn % _SWEEP_EVERY == 0:
                    await self._store.sweep(self._keep_s)
            except StoreUnavailable as error:
                self._served.metrics.store_failures.add(1, {"operation": "responses"})
                _log.debug("responses not looked after: %s", error)
            except Exception:
                _log.exception("responses were not looked after; it is tried again")

    async def look(self) -> None:
        """Bring to its end what has no reader here; one that cannot be holds up no other. Raises `StoreUnavailable`."""
        for name, tenant in await self._store.left(_MOST):
            stored = None if name in self._following else await self._store.get(name, tenant)
            if stored is None:
                continue
            try:
                await self.refresh(stored, tenant)
            except HeadraceError as error:
                self._served.metrics.store_failures.add(1, {"operation": "responses"})
                _log.info("a response is left for later", extra=fields(response=name, error=error.message))

    async def close(self) -> None:
        """Other edges will see to what runs."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _add(self, tenant: str, job: str, stored: StoredResponse) -> None:
        try:
            await self._store.add(tenant, stored)
        except BaseException:
            await self._detached.undo(job, tenant)
            raise

    async def _follow(self, stored: StoredResponse, tenant: str, measure: Measure) -> None:
        reading = None
        try:
            reader = await self._detached.attach(_job(stored), tenant)
            reading = self._reading(stored, tenant, reader, UNTOLD)
            end = await self._to_end(reading)
            self._served.metrics.background_responses.add(1, {"model": reader.draft.model, "status": end["status"]})
            if reading.answer.done and not reader.done:  # after the only call that was allowed
                await self._detached.cancel(_job(stored), tenant)
        except HeadraceError as error:
            _log.info("a background response is left to others", extra=fields(response=stored.id, error=error.message))
        except Exception:
            _log.exception("a background response is left to others", extra=fields(response=stored.id))
        finally:
            self._following.pop(stored.id, None)
            if reading is not None:
                usage = reading.answer.usage
                measure.computed(usage.prompt_tokens, usage.completion_tokens)
                reading.answer.cancel()

    def _reading(self, stored: StoredResponse, tenant: str, reader: Reader, after: int = -1) -> Reading:
        if reader.draft.model not in self._served.names.models:
            raise UnreadableMessage("This server does not serve the response's model any more.")
        served = self._served.of(reader.draft.model)
        tools = read_functions(*(stored.object[name] for name in ("tools", "tool_choice", "parallel_tool_calls")))
        answer = begin(served, Prepared(reader.draft, tools), OneByOne(reader))
        response = {**stored.object, "status": "in_progress", "output": [], "usage": None}
        response |= {"completed_at": None, "error": None, "incomplete_details": None}
        return Reading(response, answer, Transcript(reader.id, after), partial(self._keep, tenant), self._served.clock)

    async def _settle(self, stored: StoredResponse, tenant: str, state: JobState) -> Object:
        """Its job has ended in `state`. Raises `StoreUnavailable`; `UnreadableMessage` when only another version can read it."""
        try:
            return (await self._all(stored, tenant))[1]
        except (Gone, NotFound) as error:
            return await self._keep(tenant, failed(stored.object, (), error))
        except UnreadableMessage:
            if state is not JobState.FAILED:
                raise
            return await self._keep(tenant, failed(stored.object, (), InternalError("Internal error.")))

    async def _all(self, stored: StoredResponse, tenant: str) -> tuple[Reading, Object]:
        """Its job has ended: all of it, read. Raises as `read`."""
        try:
            async with asyncio.timeout(_SETTLE_S):
                reading = await self.read(stored, tenant, UNTOLD)
                return reading, await self._to_end(reading)
        except TimeoutError:
            raise StoreUnavailable("The response could not be read in time.", retry_after=1.0) from None

    async def _to_end(self, reading: Reading) -> Object:
        """Raises `StoreUnavailable`; `Gone` and `NotFound` when its tokens are not there any more."""
        transcript = reading.transcript
        try:
            while not reading.answer.done:
                for piece in await reading.answer.next(_LOOK_S) or ():
                    transcript.take(piece)
        except JobCancelled:
            transcript.break_off()
            return await reading.keep(cancelled(reading.response, transcript.output))
        except (Gone, NotFound, StoreUnavailable):
            raise
        except HeadraceError as error:
            transcript.break_off()
            return await reading.keep(failed(reading.response, transcript.output, error))
        return await reading.conclude()

    async def _keep(self, tenant: str, end: Object) -> Object:
        return await self._store.end(tenant, end) or end


def _job(stored: StoredResponse) -> str:
    return stored.id.removeprefix(PREFIX)
