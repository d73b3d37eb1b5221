"""Where the endpoints of responses and conversations are, and what they are made of."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from services.edge.api.document import json_body, query
from services.edge.api.served import Served
from services.edge.responses.background import Background, Detached
from services.edge.responses.conversations import ConversationRequest, Conversations
from services.edge.responses.endpoints import Responses
from services.edge.responses.request import ResponsesRequest
from services.edge.store.conversations import SqlConversationStore
from services.edge.store.database import Database
from services.edge.store.responses import SqlResponseStore

_DAY_S = 86_400.0
_PAGE = query(limit="integer", order="string", after="string")


def add_responses(app: FastAPI, served: Served, detached: Detached, database: Database) -> Background:
    """The endpoints, added to `app`. What is returned has to run, and to be closed."""
    store, conversations = SqlResponseStore(database), SqlConversationStore(database)
    background = Background(served, detached, store, served.settings.responses_keep_days * _DAY_S)
    app.include_router(responses_router(Responses(served, store, conversations, background), served.text.name))
    app.include_router(conversations_router(Conversations(served, conversations)))
    return background


def responses_router(responses: Responses, model: str) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")
    example = {"model": model, "input": "What is Kubernetes?", "max_output_tokens": 100}

    @router.post("", openapi_extra=json_body(ResponsesRequest, ["model", "input"], **example))
    async def create(request: Request) -> Response:
        """As OpenAI's; with `stream` the answer comes as server-sent events, with `background` it outlives its client."""
        return await responses.create(request)

    @router.get("/{response}", openapi_extra=query(stream="boolean", starting_after="integer"))
    async def retrieve(request: Request, response: str) -> Response:
        """With `stream=true` the events of a background response, from the one after `starting_after` on."""
        return await responses.retrieve(request, response)

    @router.delete("/{response}")
    async def delete(request: Request, response: str) -> Response:
        return await responses.delete(request, response)

    @router.post("/{response}/cancel")
    async def cancel(request: Request, response: str) -> Response:
        return await responses.cancel(request, response)

    @router.get("/{response}/input_items", openapi_extra=_PAGE)
    async def input_items(request: Request, response: str) -> Response:
        return await responses.input_items(request, response)

    return router


def conversations_router(conversations: Conversations) -> APIRouter:
    router = APIRouter(prefix="/v1/conversations")
    metadata = {"metadata": {"topic": "clouds"}}
    items = {"items": [{"role": "user", "content": "What is Kubernetes?"}]}

    @router.post("", openapi_extra=json_body(ConversationRequest, [], **metadata, **items))
    async def create(request: Request) -> Response:
        return await conversations.create(request)

    @router.get("/{conversation}")
    async def retrieve(request: Request, conversation: str) -> Response:
        return await conversations.retrieve(request, conversation)

    @router.post("/{conversation}", openapi_extra=json_body(ConversationRequest, ["metadata"], **metadata))
    async def update(request: Request, conversation: str) -> Response:
        return await conversations.update(request, conversation)

    @router.delete("/{conversation}")
    async def delete(request: Request, conversation: str) -> Response:
        return await conversations.delete(request, conversation)

    @router.get("/{conversation}/items", openapi_extra=_PAGE)
    async def list_items(request: Request, conversation: str) -> Response:
        return await conversations.items(request, conversation)

    @router.post("/{conversation}/items", openapi_extra=json_body(ConversationRequest, ["items"], **items))
    async def add_items(request: Request, conversation: str) -> Response:
        return await conversations.add_items(request, conversation)

    @router.get("/{conversation}/items/{item}")
    async def item(request: Request, conversation: str, item: str) -> Response:
        return await conversations.item(request, conversation, item)

    @router.delete("/{conversation}/items/{item}")
    async def delete_item(request: Request, conversation: str, item: str) -> Response:
        return await conversations.delete_item(request, conversation, item)

    return router
