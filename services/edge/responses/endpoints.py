"""`/v1/responses`: create, retrieve, cancel, delete, input items."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.errors import InvalidRequest, NotFound
from services.edge.api.body import read_json
from services.edge.api.exchange import Pace
from services.edge.api.measure import Measure
from services.edge.api.request import read_request
from services.edge.api.served import Served
from services.edge.api.start import reserve
from services.edge.gate.meter import Reservation
from services.edge.responses.background import Background
from services.edge.responses.history import history, number, page
from services.edge.responses.items import Item, read_items
from services.edge.responses.objects import Object, begun
from services.edge.responses.prepare import Prepared, begin, features, prepare
from services.edge.responses.request import ResponsesRequest
from services.edge.responses.telling import Reading, StreamedResponse, WholeResponse
from services.edge.responses.transcript import UNTOLD, Transcript
from services.edge.selection.asking import asking
from services.edge.selection.turns import Turn, first_to_take, planned
from services.edge.store.conversations import SqlConversationStore
from services.edge.store.responses import PREFIX, SqlResponseStore, StoredResponse
from services.telemetry.metrics import Metrics


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
        arrived = served.clock.monotonic()
        body = await read_json(request, served.settings)
        asked = read_request(ResponsesRequest, body)
        items = read_items(asked.input, self.new_id)
        before = await history(asked, by.caller.tenant.name, self._store, self._conversations)

        async def take(turn: Turn, asked: ResponsesRequest) -> Response:
            prepared = await prepare(turn, by.caller, asked, [*before, *items])
            reservation = await reserve(served, by.caller, [prepared.draft], param="input")
            measure = Measure(served.metrics, served.clock, asked.model, arrived)
            start = self._in_background if asked.background else self._in_foreground
            return await start(request, turn, asked, prepared, items, reservation, measure)

        seen = partial(features, asked, [*before, *items])
        plan = planned(served, by, asked.model, seen, asked.metadata, portable=asked.portable)
        return await first_to_take(served, plan, asked, take, by.tell)

    async def retrieve(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        tenant: str = request.state.caller.tenant.name
        if request.query_params.get("stream") not in ("true", "True", "1"):
            return JSONResponse(await self._background.refresh(stored, tenant))
        if not stored.object["background"]:
            raise InvalidRequest("Only a background response can be streamed again.", param="stream")
        after = number(request.query_params, "starting_after", -1, 0, 2**31)
        return await self._stream(request, stored, after)

    async def cancel(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        if not stored.object["background"]:
            raise InvalidRequest("Only a background response can be cancelled.")
        return JSONResponse(await self._background.cancel(stored, request.state.caller.tenant.name))

    async def delete(self, request: Request, name: str) -> Response:
        stored = await self._find(request, name)
        tenant = request.state.caller.tenant.name
        if not await self._store.delete(name, tenant):
            raise _unknown(name)
        if stored.object["background"]:
            await self._background.forget(stored, tenant)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: Request, name: str) -> Response:
        """The response's own: not those of the responses before it."""
        return JSONResponse(page((await self._find(request, name)).input, request.query_params))

    def new_id(self) -> str:
        """Of an item."""
        return f"{self._served.random.getrandbits(128):032x}"

    async def _in_foreground(
        self,
        request: Request,
        turn: Turn,
        asked: ResponsesRequest,
        prepared: Prepared,
        items: list[Item],
        reservation: Reservation,
        measure: Measure,
    ) -> Response:
        clock, tenant = self._served.clock, request.state.caller.tenant.name
        with reservation.undone_on_failure():
            answer = begin(turn.served, prepared)
            await turn.admitted(answer)
        response = begun(PREFIX + answer.id, int(clock.wall()), asked, prepared.draft.sampling)
        transcript = Transcript(answer.id) if asked.stream else Transcript(answer.id, UNTOLD)
        reading = Reading(response, answer, transcript, partial(self._keep, tenant, items), clock)
        kind = StreamedResponse if asked.stream else WholeResponse
        return kind(reading, reservation, request.state.request_id, self._pace, measure)

    async def _in_background(
        self,
        request: Request,
        turn: Turn,
        asked: ResponsesRequest,
        prepared: Prepared,
        items: list[Item],
        reservation: Reservation,
        measure: Measure,
    ) -> Response:
        def make(name: str) -> Object:
            return begun(name, int(self._served.clock.wall()), asked, prepared.draft.sampling)

        tenant = request.state.caller.tenant.name
        stored = await self._background.start(tenant, prepared, make, items, reservation, measure)
        return await self._stream(request, stored) if asked.stream else JSONResponse(stored.object)

    async def _stream(self, request: Request, stored: StoredResponse, after: int = -1) -> Response:
        """What it uses is counted where it runs, not with each of its readers."""
        reading = await self._background.read(stored, request.state.caller.tenant.name, after)
        clock = self._served.clock
        nothing = self._served.meter.nothing(request.state.caller)
        measure = Measure(self._unmeasured, clock, stored.object["model"], clock.monotonic())
        return StreamedResponse(reading, nothing, request.state.request_id, self._pace, measure, lives_on=True)

    async def _keep(self, tenant: str, items: list[Item], end: Object) -> Object:
        if end["store"] or end["conversation"] is not None:
            await self._store.add(tenant, StoredResponse(end, items), keep=end["store"])
        return end

    async def _find(self, request: Request, name: str) -> StoredResponse:
        stored = await self._store.get(name, request.state.caller.tenant.name)
        if stored is None:
            raise _unknown(name)
        return stored


def _unknown(name: str) -> NotFound:
    return NotFound(f"Response with id {name[:64]!r} not found.")
