"""`/v1/responses`: create, retrieve, cancel, delete, input items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.errors import InvalidRequest, NotFound
from services.edge.api.body import read_json
from services.edge.api.exchange import Pace
from services.edge.api.extras import OF_CHAT, refuse_extras
from services.edge.api.gate import tenant_of
from services.edge.api.measure import QUEUED, Measure
from services.edge.api.request import read_request
from services.edge.api.served import Served
from services.edge.api.start import reserve
from services.edge.gate.meter import Reservation
from services.edge.responses.background import Background
from services.edge.responses.history import history, number, page, yes
from services.edge.responses.items import Item, must_be_new, read_items
from services.edge.responses.objects import Object, begun
from services.edge.responses.prepare import Prepared, begin, features, prepare
from services.edge.responses.request import ResponsesRequest
from services.edge.responses.telling import Reading, StreamedResponse, WholeResponse
from services.edge.responses.transcript import UNTOLD, Transcript
from services.edge.selection.asking import asking
from services.edge.selection.turns import Asking, Turn, first_to_take, planned
from services.edge.store.conversations import SqlConversationStore
from services.edge.store.responses import PREFIX, SqlResponseStore, StoredResponse
from services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that the model of this turn takes, with all that its response is made of."""

    request: Request
    by: Asking
    turn: Turn
    asked: ResponsesRequest
    prepared: Prepared
    items: list[Item]
    reservation: Reservation


class Responses:
    """Every endpoint raises `HeadraceError`. A tenant sees what is its own only."""

    def __init__(
        self, served: Served, store: SqlResponseStore, conversations: SqlConversationStore, background: Background
    ) -> None:
        self._served = served
        self._store = store
        self._conversations = conversations
        self._background = background
        self._pace = Pace.of(served.settings)
        self._unmeasured = Metrics.null()

    async def create(self, request: Request) -> Response:
        served, by = self._served, asking(request)
        body = await read_json(request, served.settings)
        by.names(served, body.get("model"))
        asked = read_request(ResponsesRequest, body)
        refuse_extras(body, OF_CHAT)
        items = read_items(asked.input, served.random)
        before = await history(asked, by.caller.tenant.name, self._store, self._conversations)
        must_be_new(items, (item["id"] for item in before))

        async def take(turn: Turn, asked: ResponsesRequest) -> Response:
            prepared = await prepare(turn, by.caller, asked, [*before, *items])
            reservation = await reserve(served, by.caller, [prepared.draft], param="input")
            admitted = _Admitted(request, by, turn, asked, prepared, items, reservation)
            return await (self._in_background(admitted) if asked.background else self._in_foreground(admitted))

        seen = partial(features, asked, [*before, *items])
        plan = planned(served, by, asked.model, seen, asked.metadata, portable=asked.portable)
        return await first_to_take(served, by, plan, asked, take)

    async def retrieve(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        tenant = tenant_of(request)
        if not yes(request.query_params, "stream"):
            return JSONResponse(await self._background.refresh(stored, tenant))
        if not stored.object["background"]:
            raise InvalidRequest("Only a background response can be streamed again.", param="stream")
        after = number(request.query_params, "starting_after", -1, 0, 2**31)
        if after >= 0:
            await self._background.must_reach(stored, tenant, after)
        return await self._stream(request, stored, after)

    async def cancel(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        if not stored.object["background"]:
            raise InvalidRequest("Only a background response can be cancelled.")
        return JSONResponse(await self._background.cancel(stored, tenant_of(request)))

    async def delete(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        tenant = tenant_of(request)
        if not await self._store.delete(name, tenant):
            raise _unknown(name)
        if stored.object["background"]:
            await self._background.forget(stored, tenant)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request, name: str) -> Response:
        """The response's own: not those of the responses before it."""
        return JSONResponse(page((await self._find(request, name)).input, request.query_params))

    async def _in_foreground(self, admitted: _Admitted) -> Response:
        with admitted.reservation.undone_on_failure():
            answer = begin(admitted.turn.served, admitted.prepared)
            await admitted.turn.admitted(answer)
        response = self._begun(admitted, PREFIX + answer.id)
        transcript = Transcript(answer.id) if admitted.asked.stream else Transcript(answer.id, UNTOLD)
        keep = partial(self._keep, admitted.by.caller.tenant.name, admitted.items)
        reading = Reading(response, answer, transcript, keep, self._served.clock)
        kind = StreamedResponse if admitted.asked.stream else WholeResponse
        return kind(reading, admitted.reservation, admitted.request.state.request_id, self._pace, admitted.by.measure)

    async def _in_background(self, admitted: _Admitted) -> Response:
        by, make = admitted.by, partial(self._begun, admitted)
        tenant = by.caller.tenant.name
        stored = await self._background.start(tenant, admitted.prepared, make, admitted.items, admitted.reservation, by.measure)
        by.measure.finished(QUEUED)
        return await self._stream(admitted.request, stored) if admitted.asked.stream else JSONResponse(stored.object)

    def _begun(self, admitted: _Admitted, name: str) -> Object:
        return begun(name, int(self._served.clock.wall()), admitted.asked, admitted.prepared.draft)

    async def _stream(self, request: Request, stored: StoredResponse, after: int = -1) -> Response:
        """What it uses is counted where it runs, not with each of its readers."""
        reading = await self._background.read(stored, tenant_of(request), after)
        nothing = self._served.meter.nothing(request.state.caller)
        measure = Measure(self._unmeasured, self._served.clock)
        return StreamedResponse(reading, nothing, request.state.request_id, self._pace, measure, lives_on=True)

    async def _keep(self, tenant: str, items: list[Item], end: Object) -> Object:
        if end["store"] or end["conversation"] is not None:
            await self._store.add(tenant, StoredResponse(end, items), keep=end["store"])
        return end

    async def _find(self, request: Request, name: str) -> StoredResponse:
        stored = await self._store.get(name, tenant_of(request))
        if stored is None:
            raise _unknown(name)
        return stored


def _unknown(name: str) -> NotFound:
    return NotFound(f"Response with id {name[:64]!r} not found.")
