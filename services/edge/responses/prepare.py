"""From a checked request and all that came before to a job that can start. Everything that can be refused is refused here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas.errors import EmptyArray, UnsupportedParameter
from services.edge.api.answer import AnyAnswer
from services.edge.api.parameters import refuse_unsupported
from services.edge.api.ports import Handle
from services.edge.api.served import Served
from services.edge.api.start import draft, start
from services.edge.api.template_variables import read_variables
from services.edge.api.tools import Tools
from services.edge.gate.records import Caller
from services.edge.jobs.draft import Draft
from services.edge.responses.items import Item, to_messages
from services.edge.responses.request import ResponsesRequest, check, read_format, read_functions
from services.edge.selection.features import of_messages
from services.edge.selection.turns import Turn
from services.settings.selection import Features


@dataclass(frozen=True, slots=True)
class Prepared:
    """`tools`: what calls are looked for in its answer; None: none."""

    draft: Draft
    tools: Tools | None


def features(asked: ResponsesRequest, items: Sequence[Item], hint: str) -> Features:
    """What the request is like, whichever model answers it. Raises `InvalidRequest`."""
    return of_messages(_messages(asked, items), hint, tools=_tools(asked) is not None)


async def prepare(turn: Turn, caller: Caller, asked: ResponsesRequest, items: Sequence[Item]) -> Prepared:
    """With the model of this turn. `items`: history and input. Raises `HeadraceError`."""
    served = turn.served
    card = served.card()
    follows_grammars = "grammar" in card.capabilities.grammar
    check(asked, follows_grammars=follows_grammars)
    tools, grammar = _tools(asked), read_format(asked)
    if grammar is not None:
        _must_offer(grammar.kind, card.capabilities.grammar)
    refuse_unsupported(asked, card.capabilities)
    if grammar is not None:
        await served.text.must_compile(grammar, "text.format")
    calling = tools.grammar(served.text.tool_format.syntax, grammar) if tools is not None and follows_grammars else None
    if calling is not None:
        await served.text.must_compile(calling, "tools")
        grammar = calling
    variables = read_variables(asked.chat_template_kwargs)
    ids = await served.text.encode(_messages(asked, items), tools.functions if tools else (), variables)
    job = draft(served, caller, asked, card, ids, most=asked.max_output_tokens, grammar=grammar, param="input")
    return Prepared(turn.draft(job), tools)


def begin(served: Served, prepared: Prepared, handle: Handle | None = None) -> AnyAnswer:
    """The job starts, unless it has, as `handle`. `served`: for the job's model. Its answer has to be read, or cancelled."""
    return start(served, prepared.draft, tools=prepared.tools, handle=handle)


def _messages(asked: ResponsesRequest, items: Sequence[Item]) -> list[dict[str, Any]]:
    if not items:
        raise EmptyArray("'input' must hold at least one item.", param="input")
    told = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    return [*told, *to_messages(items)]


def _tools(asked: ResponsesRequest) -> Tools | None:
    return read_functions(asked.tools, asked.tool_choice, asked.parallel_tool_calls)


def _must_offer(kind: str, offered: Sequence[str]) -> None:
    if kind not in offered:
        raise UnsupportedParameter("This model does not support 'text.format'.", param="text.format")
