"""POST /v1/chat/completions: from a body to an exchange that runs.

Everything that can be refused is refused here, before a job exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from schemas.job import Grammar
from schemas.state import ModelCard
from services.edge.api.answer import AnyAnswer
from services.edge.api.body import read_json
from services.edge.api.chat_form import ChatForm
from services.edge.api.exchange import Pace, Streamed, Whole
from services.edge.api.form import Form
from services.edge.api.measure import Measure
from services.edge.api.messages import check_messages
from services.edge.api.parameters import refuse_unsupported
from services.edge.api.request import ChatRequest, read_request, read_stops
from services.edge.api.response_format import read_response_format
from services.edge.api.served import Served
from services.edge.api.start import draft, reserve, start, start_with_tools
from services.edge.api.tools import Tools, read_tools
from services.edge.gate.meter import Reservation
from services.edge.gate.records import Caller


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that computes, how it is written, and whether as it comes."""

    answer: AnyAnswer
    form: Form
    reservation: Reservation
    model: str
    stream: bool


class ChatCompletions:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._pace = Pace.of(served.settings)

    async def __call__(self, request: Request) -> Response:
        """Raises `HeadraceError`, `ClientGone`."""
        served, settings = self._served, self._served.settings
        arrived = served.clock.monotonic()
        body = await read_json(request, settings)
        begun = await self.begin(body, request.state.caller)
        exchange = Streamed if begun.stream else Whole
        measure = Measure(served.metrics, served.clock, begun.model, arrived)
        return exchange(begun.answer, begun.form, begun.reservation, request.state.request_id, self._pace, measure)

    async def begin(self, body: dict[str, Any], caller: Caller) -> Begun:
        """The same for every transport. Its answer has to be read, or cancelled. Raises `HeadraceError`."""
        served, settings = self._served, self._served.settings
        asked = read_request(ChatRequest, body)
        messages = check_messages(asked.messages)
        stops = read_stops(asked.stop, settings.max_stops)
        tools = read_tools(asked)
        grammar = read_response_format(asked.response_format)
        card = served.card(asked.model, caller)
        refuse_unsupported(asked, card.capabilities)
        if grammar is not None:
            await served.text.must_compile(grammar, "response_format")
        if tools is not None and (calling := self._calling(tools, grammar, card)) is not None:
            await served.text.must_compile(calling, "tools")
            grammar = calling
        ids = await served.text.encode(messages, tools.functions if tools else ())
        most = asked.max_completion_tokens or asked.max_tokens or settings.default_max_tokens
        job = draft(served, caller, asked, card, ids, most=most, grammar=grammar)
        reservation = await reserve(served, caller, [job])
        with reservation.undone_on_failure():
            answer = start_with_tools(served, job, stops, tools) if tools else start(served, job, stops)
        form = ChatForm(f"chatcmpl-{answer.id}", int(served.clock.wall()), asked.model, usage=asked.usage_streamed)
        return Begun(answer, form, reservation, asked.model, bool(asked.stream))

    def _calling(self, tools: Tools, content: Grammar | None, card: ModelCard) -> Grammar | None:
        """What makes calls keep to their schemas. An engine that can follow no grammar is not asked to: it calls as it likes."""
        return tools.grammar(self._served.text.tool_format.syntax, content) if "grammar" in card.capabilities.grammar else None
