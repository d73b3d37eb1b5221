"""POST /tokenize and /detokenize, as vLLM has them: what a text, or a chat, is in the model's tokens. Needs no worker."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import InvalidRequest
from services.edge.api import document
from services.edge.api.body import read_json
from services.edge.api.extras import OF_CHAT, OF_TEXT, refuse_extras
from services.edge.api.messages import check_messages
from services.edge.api.ports import TextModel
from services.edge.api.prompts import read_ids
from services.edge.api.request import read_request
from services.edge.api.served import Served
from services.edge.api.template_variables import read_variables
from services.edge.api.tools import read_tools
from services.edge.selection import told
from services.edge.selection.asking import asking
from services.edge.selection.features import of_messages, of_texts
from services.edge.selection.turns import FeaturesOf, planned


class TokenizeRequest(BaseModel):
    """Either `prompt` or `messages`; `model` may be left out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Any, document.MESSAGES] = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


class Tokens:
    def __init__(self, served: Served) -> None:
        self._served = served

    async def tokenize(self, request: Request) -> Response:
        """Raises `HeadraceError`."""
        body = await self._body(request)
        asked = read_request(TokenizeRequest, body)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequest("Either 'prompt' or 'messages' is needed.", param="prompt")
        refuse_extras(body, OF_CHAT if asked.prompt is None else OF_TEXT)
        if asked.prompt is not None:
            text = self._text(request, asked.model, partial(of_texts, [asked.prompt]))
            ids = await text.encode_text(asked.prompt)
        else:
            messages, variables = check_messages(asked.messages), read_variables(asked.chat_template_kwargs)
            tools = read_tools(asked.tools)
            text = self._text(request, asked.model, partial(of_messages, messages, tools=tools is not None))
            ids = await text.encode(messages, tools.functions if tools else (), variables)
        card = self._served.jobs.card(text.name)
        told = {
            "count": len(ids),
            "max_model_len": card.context_length if card is not None else None,
            "tokens": ids,
            "token_strs": await text.spellings(ids) if asked.return_token_strs else None,
        }
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Raises `HeadraceError`."""
        asked = read_request(DetokenizeRequest, await self._body(request))
        text = self._text(request, asked.model, partial(of_texts, []), portable=False)
        ids = read_ids(asked.tokens, "tokens", text.vocabulary)
        return Response(msgspec.json.encode({"prompt": await text.decode_any(ids)}), media_type="application/json")

    def _text(self, request: Request, model: str | None, features: FeaturesOf, *, portable: bool = True) -> TextModel:
        """Of the model that a chat would be meant for, whether or not it has a worker. Raises `HeadraceError`."""
        by = asking(request)
        plan = planned(self._served, by, model or self._served.text.name, features, portable=portable)
        by.tell(told.headers(plan, plan.candidates[0], ()))
        return self._served.of(plan.candidates[0]).text

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, self._served.settings)
