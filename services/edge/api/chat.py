"""POST /v1/chat/completions: from a body to an exchange that runs.

Everything that can be refused is refused here, before a job exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from schemas.job import Grammar
from schemas.state import ModelCard
from services.edge.api.begun import Begun
from services.edge.api.body import read_json
from services.edge.api.chat_form import ChatForm
from services.edge.api.exchange import Pace
from services.edge.api.extras import OF_CHAT, refuse_extras
from services.edge.api.messages import check_messages
from services.edge.api.parameters import refuse_unsupported
from services.edge.api.request import ChatRequest, Stops, read_request, read_stops
from services.edge.api.response_format import read_response_format
from services.edge.api.served import Served
from services.edge.api.start import draft, reserve, start
from services.edge.api.template_variables import read_variables
from services.edge.api.tools import Tools, read_tools
from services.edge.selection.asking import asking
from services.edge.selection.features import of_messages
from services.edge.selection.turns import Asking, Turn, first_to_take, planned
from services.settings.selection import Features


@dataclass(frozen=True, slots=True)
class _Read:
    """What a request says, whichever model answers it."""

    messages: Sequence[dict[str, Any]]
    variables: Mapping[str, Any]
    stops: Stops
    tools: Tools | None
    grammar: Grammar | None

    def features(self, hint: str) -> Features:
        return of_messages(self.messages, hint, tools=self.tools is not None)


class ChatCompletions:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._pace = Pace.of(served.settings)

    async def __call__(self, request: Request) -> Response:
        """Raises `HeadraceError`."""
        by = asking(request)
        begun = await self.begin(await read_json(request, self._served.settings), by)
        return begun.exchange(request.state.request_id, self._pace, by.measure)

    async def begin(self, body: dict[str, Any], by: Asking) -> Begun:
        """The same for every transport. Its answer has to be read, or cancelled. Raises `HeadraceError`."""
        served, settings = self._served, self._served.settings
        by.names(served, body.get("model"))
        asked = read_request(ChatRequest, body)
        refuse_extras(body, OF_CHAT)
        messages = check_messages(asked.messages)
        stops = read_stops(asked, settings.max_stops)
        variables, grammar = read_variables(asked.chat_template_kwargs), read_response_format(asked.response_format)
        tools = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        read = _Read(messages, variables, stops, tools, grammar)
        plan = planned(served, by, asked.model, read.features, asked.metadata, portable=asked.portable)
        return await first_to_take(served, by, plan, asked, partial(_begin, by, read))


async def _begin(by: Asking, read: _Read, turn: Turn, asked: ChatRequest) -> Begun:
    """With the model of this turn. Raises `HeadraceError`."""
    served, tools, grammar = turn.served, read.tools, read.grammar
    card = served.card()
    refuse_unsupported(asked, card.capabilities)
    if grammar is not None:
        await served.text.must_compile(grammar, "response_format")
    if tools is not None and (calling := _calling(served, tools, grammar, card)) is not None:
        await served.text.must_compile(calling, "tools")
        grammar = calling
    ids = await served.text.encode(read.messages, tools.functions if tools else (), read.variables)
    most = asked.max_completion_tokens or asked.max_tokens
    job = turn.draft(draft(served, by.caller, asked, card, ids, most=most, grammar=grammar))
    reservation = await reserve(served, by.caller, [job])
    with reservation.undone_on_failure():
        answer = start(served, job, read.stops, tools)
        await turn.admitted(answer)
    created = int(served.clock.wall())
    form = ChatForm(f"chatcmpl-{answer.id}", created, asked.model, job.tier, usage=asked.usage_streamed)
    return Begun(answer, form, reservation, asked.model, bool(asked.stream))


def _calling(served: Served, tools: Tools, content: Grammar | None, card: ModelCard) -> Grammar | None:
    """What makes calls keep to their schemas. An engine that can follow no grammar is not asked to: it calls as it likes."""
    return tools.grammar(served.text.tool_format.syntax, content) if "grammar" in card.capabilities.grammar else None
