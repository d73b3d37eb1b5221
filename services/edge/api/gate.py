"""Around every request: its id, who asks, the refusal of new work while the process drains, the envelope of what nobody caught.

Owns the count of requests in progress. Invariants: every answer carries `x-request-id`, and none ends while its request is
being sent; no failure of ours reaches the server; what is not always open sees a caller (`request.state.caller`) or is not
reached; a request to generate is in the metrics once (`request.state.measure`), whoever refuses it; what computes or writes is
counted as a request of its caller's minute before it is read, whatever the caller did wrong.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from schemas.errors import HeadraceError, InvalidApiKey, Unavailable
from services.edge.api import explain_header
from services.edge.api.errors import error_response, internal_error
from services.edge.api.measure import Measure
from services.edge.api.rates import rate_headers
from services.edge.api.unread import Unread
from services.edge.api.watch import SEND_BODY
from services.edge.gate.door import Door
from services.edge.gate.meter import Meter, Reservation
from services.edge.selection.asking import told
from services.telemetry.logs import fields

_log = logging.getLogger("headrace.edge")
_ACCEPTED = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
_ALWAYS_OPEN = frozenset({"/health", "/ready"})
_GENERATE = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_COMPUTE = _GENERATE | {"/tokenize", "/detokenize"}
_CONVERSATIONS = "/v1/conversations"


class Traffic:
    """Requests in progress, and whether new ones may begin."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """True once nothing is in progress, False after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def tenant_of(request: Request) -> str:
    """The name of whose request it is, once it is let in."""
    return str(request.state.caller.tenant.name)


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        traffic: Traffic,
        door: Door,
        meter: Meter,
        new_id: Callable[[], str],
        new_measure: Callable[[], Measure],
    ) -> None:
        self._app = app
        self._traffic = traffic
        self._door = door
        self._meter = meter
        self._new_id = new_id
        self._new_measure = new_measure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, measure = self._request_id(scope), self._new_measure()
        header = (b"x-request-id", request_id.encode())
        scope.setdefault("state", {}).update({"request_id": request_id, "measure": measure, SEND_BODY: send})
        unread, started = Unread(scope, receive), False
        counted: Reservation | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, measure.status = True, message["status"]
                if counted is not None:
                    counted.answered(measure.status)
                own = unread.without_length(message["headers"])
                message["headers"] = [*own, header, *self._rates(scope), *told(scope)]
            elif unread.more and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await unread.discard()
                message = {"type": "http.response.body"}
            await send(message)

        self._traffic.enter()
        try:
            if scope["path"] not in _ALWAYS_OPEN:
                counted = await self._admit(scope)
            await self._app(scope, unread.receive, send_with_id)
        except HeadraceError as refusal:
            measure.failed(refusal)
            await error_response(refusal)(scope, receive, send_with_id)
        except Exception:
            _log.exception("a request failed", extra=fields(request=request_id, path=scope["path"]))
            failure = internal_error(request_id)
            measure.failed(failure)
            if not started:
                await error_response(failure)(scope, receive, send_with_id)
        finally:
            self._traffic.leave()
            if scope["method"] == "POST" and scope["path"] in _GENERATE:
                measure.answered()

    async def _admit(self, scope: Scope) -> Reservation | None:
        """What it was counted as. Raises the `HeadraceError` that keeps the request out."""
        if self._traffic.draining:
            raise Unavailable("The server takes no new requests now.", retry_after=1.0)
        if sum(name == b"authorization" for name, _ in scope["headers"]) > 1:  # a proxy may have read the other one
            raise InvalidApiKey("There is more than one 'Authorization' header.")
        headers, peer = dict(scope["headers"]), scope.get("client")
        explain = explain_header.asked(headers)
        caller = scope["state"]["caller"] = await self._door.enter(headers, peer[0] if peer else None, explain=explain)
        return await self._meter.count(caller) if _counts(scope["method"], scope["path"]) else None

    def _rates(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        caller = scope["state"].get("caller")
        return rate_headers(self._meter, caller) if caller is not None else []

    def _request_id(self, scope: Scope) -> str:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _ACCEPTED.fullmatch(value):
                return str(value.decode())
        return self._new_id()


def _counts(method: str, path: str) -> bool:
    return method in ("POST", "DELETE") and (path in _COMPUTE or path.startswith(_CONVERSATIONS))
