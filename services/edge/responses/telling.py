"""One response over HTTP: its events as they come, or the whole object at its end. It is kept before its client hears the end.

Owns the order of these: a client that was told that a response is complete finds it, and can build on it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.errors import HeadraceError, StoreUnavailable
from services.clock import Clock
from services.edge.api.answer import AnyAnswer
from services.edge.api.exchange import STREAM_HEADERS, Exchange, Pace
from services.edge.api.form import KEEP_ALIVE
from services.edge.api.measure import Measure
from services.edge.api.watch import Writer
from services.edge.api.written import encode
from services.edge.gate.meter import Reservation
from services.edge.jobs.handle import JobCancelled
from services.edge.responses.objects import Object, cancelled, ended, failed
from services.edge.responses.transcript import Transcript

Keep = Callable[[Object], Awaitable[Object]]
"""Stores how a response ended; returns how it ended: somebody else may have been first."""
_log = logging.getLogger("headrace.edge")


@dataclass(frozen=True, slots=True)
class Reading:
    """A response that is being read. `response`: as it began."""

    response: Object
    answer: AnyAnswer
    transcript: Transcript
    keep: Keep
    clock: Clock

    async def conclude(self) -> Object:
        """The answer has finished. Raises `StoreUnavailable`."""
        transcript = self.transcript
        at = int(self.clock.wall())
        return await self.keep(ended(self.response, at, transcript.output, self.answer.usage, cut=transcript.cut))


class Telling(Exchange):
    def __init__(self, reading: Reading, reservation: Reservation, request_id: str, pace: Pace, measure: Measure) -> None:
        super().__init__(reading.answer, reservation, request_id, pace, measure)
        self._reading = reading


class WholeResponse(Telling):
    """One JSON object at the end."""

    async def _send(self, writer: Writer) -> None:
        reading = self._reading
        while not reading.answer.done:
            for piece in await reading.answer.next(self._pace.keep_alive_s) or ():
                self.note(piece)
                reading.transcript.take(piece)
        await self.whole(writer, encode(await reading.conclude()))


class StreamedResponse(Telling):
    """Events as they come. `lives_on`: the response goes on without this reader, and may be cancelled by others."""

    def __init__(
        self,
        reading: Reading,
        reservation: Reservation,
        request_id: str,
        pace: Pace,
        measure: Measure,
        *,
        lives_on: bool = False,
    ) -> None:
        super().__init__(reading, reservation, request_id, pace, measure)
        self._lives_on = lives_on

    async def _send(self, writer: Writer) -> None:
        reading, transcript = self._reading, self._reading.transcript
        await self.start(writer, 200, STREAM_HEADERS)
        if began := transcript.begin(reading.response):
            await writer.body(began)
        try:
            while not reading.answer.done:
                pieces = await reading.answer.next(self._pace.keep_alive_s)
                data = KEEP_ALIVE if pieces is None else b""
                for piece in pieces or ():
                    self.note(piece)
                    data += transcript.take(piece)
                if data:
                    await writer.body(data)
            last = await reading.conclude()
        except JobCancelled:
            if not self._lives_on:
                raise
            data = transcript.break_off()
            last = await reading.keep(cancelled(reading.response, transcript.output))
            await writer.body(data)
        await writer.body(transcript.end(last), more=False)

    async def _failure(self, error: HeadraceError) -> bytes:
        reading, transcript = self._reading, self._reading.transcript
        data = transcript.break_off()
        last = failed(reading.response, transcript.output, error)
        if self._lives_on and isinstance(error, StoreUnavailable):
            return data + transcript.end(last)  # only this stream has failed
        try:
            last = await reading.keep(last)
        except StoreUnavailable:
            _log.warning("a failed response was not stored")
        return data + transcript.end(last)
