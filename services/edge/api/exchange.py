"""One answer to its client: from an answer to its bytes, streamed or whole, and what is measured of it.

Owns the answer until its client has it or is gone. Invariants: a refusal before the first byte is a plain HTTP status, a failure
after it is an event in the stream; `data: [DONE]` comes exactly once; nothing is written after the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from schemas.errors import HeadraceError
from services.edge.api import explain_header
from services.edge.api.answer import AnyAnswer, Piece
from services.edge.api.errors import error_response, internal_error
from services.edge.api.form import DONE, KEEP_ALIVE, Form, Said
from services.edge.api.measure import CLIENT_GONE, CLIENT_STALLED, Measure
from services.edge.api.watch import SEND_BODY, Gone, Header, Writer, watched
from services.edge.gate.meter import Reservation
from services.edge.jobs.handle import JobCancelled
from services.settings.edge import EdgeSettings

_log = logging.getLogger("headrace.edge")
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: between two signs of life on a silent stream; how long a client may not read."""

    keep_alive_s: float
    write_deadline_s: float

    @classmethod
    def of(cls, settings: EdgeSettings) -> Pace:
        return cls(settings.keep_alive_s, settings.write_deadline_s)


class Exchange(Response):
    """An ASGI response that computes while it is sent."""

    def __init__(self, answer: AnyAnswer, reservation: Reservation, request_id: str, pace: Pace, measure: Measure) -> None:
        super().__init__()
        self._answer = answer
        self._reservation = reservation
        self._request_id = request_id
        self._pace = pace
        self._measure = measure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left: str | None = CLIENT_GONE
        try:
            body = scope["state"].get(SEND_BODY, send)
            gone = await watched(receive, send, body, self.work, write_deadline=self._pace.write_deadline_s)
            left = None if gone is None else CLIENT_STALLED if gone is Gone.STALLED else CLIENT_GONE
        finally:
            self.end(left)

    def end(self, left: str | None) -> None:
        """Nobody reads any more. `left`: how the client went before it had all."""
        usage = self._answer.usage
        if left is not None:
            self._measure.left(left)
        self._measure.computed(usage.prompt_tokens, usage.completion_tokens)
        self._reservation.settle(usage.record(self._answer.id, self._measure.model))
        self._answer.cancel()

    async def work(self, writer: Writer) -> None:
        """All that there is to write, whatever happens."""
        try:
            await self._answer.admitted()
            await self._send(writer)
        except JobCancelled:
            return  # we gave it up ourselves: nobody is there to read
        except HeadraceError as error:
            await self.fail(writer, error)
        except Exception:
            _log.exception("an answer failed", extra={"headrace_fields": {"request": self._request_id}})
            await self.fail(writer, internal_error(self._request_id))

    async def start(self, writer: Writer, status: int, headers: Iterable[Header]) -> None:
        """The head of the response, with what its caller asked to be told of the placement."""
        explanation = self._answer.explanation
        told = () if explanation is None else ((explain_header.NAME, explain_header.value(explanation)),)
        await writer.start(status, (*headers, *told))

    def note(self, piece: Piece) -> None:
        """The client is about to get `piece`."""
        if piece.text or piece.calls:
            self._measure.text()
        if piece.finish is not None:
            self._measure.finished(piece.finish)

    async def whole(self, writer: Writer, data: bytes) -> None:
        """All of an answer, as one JSON object."""
        headers = ((b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()))
        await self.start(writer, 200, headers)
        await writer.body(data, more=False)

    async def _send(self, writer: Writer) -> None:
        raise NotImplementedError

    async def _failure(self, error: HeadraceError) -> bytes:
        """The last that is written when an answer fails after its first byte."""
        raise NotImplementedError

    async def fail(self, writer: Writer, error: HeadraceError) -> None:
        """The end of what cannot be written to its end."""
        self._measure.failed(error)
        if not self._answer.usage.completion_tokens:
            self._reservation.undo()
        if writer.started:
            await writer.body(await self._failure(error), more=False)
            return
        response = error_response(error)
        await self.start(writer, response.status_code, response.raw_headers)
        await writer.body(bytes(response.body), more=False)


class _Formed(Exchange):
    def __init__(
        self, answer: AnyAnswer, form: Form, reservation: Reservation, request_id: str, pace: Pace, measure: Measure
    ) -> None:
        super().__init__(answer, reservation, request_id, pace, measure)
        self._form = form

    async def _failure(self, error: HeadraceError) -> bytes:
        return self._form.error(error) + DONE


class Streamed(_Formed):
    """Events as the tokens come."""

    async def _send(self, writer: Writer) -> None:
        answer, form = self._answer, self._form
        begun: set[int] = set()
        await self.start(writer, 200, STREAM_HEADERS)
        done = answer.done
        while not done:
            pieces = await answer.next(self._pace.keep_alive_s)
            if pieces is None:
                await writer.body(KEEP_ALIVE)
                continue
            data = b""
            for piece in pieces:
                if piece.choice not in begun:
                    begun.add(piece.choice)
                    data += form.begin(piece.choice, piece.prompt)
                self.note(piece)
                if piece.text or piece.logprobs:
                    data += form.text(piece.choice, piece.text, piece.logprobs)
                for call in piece.calls:
                    data += form.call(piece.choice, call)
                if piece.finish is not None:
                    data += form.finish(piece.choice, piece.finish)
            done = answer.done
            if done:
                data += form.usage(answer.usage) + DONE
            if data:
                await writer.body(data, more=not done)


class Whole(_Formed):
    """One JSON object at the end."""

    async def _send(self, writer: Writer) -> None:
        answer = self._answer
        said: dict[int, Said] = {}
        while not answer.done:
            for piece in await answer.next(self._pace.keep_alive_s) or ():
                said.setdefault(piece.choice, Said()).add(piece)
                self.note(piece)
        await self.whole(writer, self._form.whole(said, answer.usage))
