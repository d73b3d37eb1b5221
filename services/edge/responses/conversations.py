"""`/v1/conversations`: items that outlive the responses they came from. Source: the OpenAI API reference, "Conversations"."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from schemas.errors import InvalidRequest, NotFound
from services.edge.api import document
from services.edge.api.body import read_json
from services.edge.api.gate import tenant_of
from services.edge.api.request import read_request
from services.edge.api.served import Served
from services.edge.responses.history import no_conversation, page
from services.edge.responses.items import Item, must_be_new, new_id, read_items
from services.edge.responses.objects import Object, listed
from services.edge.responses.request import Metadata
from services.edge.store.conversations import SqlConversationStore, StoredConversation

_MOST_ITEMS = 20
"""That one request may add, as OpenAI's."""


class ConversationRequest(BaseModel):
    """Of each endpoint that has a body."""

    model_config = ConfigDict(strict=True, extra="ignore")

    items: Annotated[list[Any], document.ITEMS] | None = None
    metadata: Metadata | None = None


class Conversations:
    """Every endpoint raises `HeadraceError`. A tenant sees what is its own only."""

    def __init__(self, served: Served, store: SqlConversationStore) -> None:
        self._served = served
        self._store = store

    async def create(self, request: Request) -> Response:
        asked = await self._body(request)
        name = f"conv_{new_id(self._served.random)}"
        items = self._items(asked)
        must_be_new(items, (), "items")
        made = await self._store.create(name, tenant_of(request), asked.metadata or {}, items)
        return JSONResponse(_conversation(made))

    async def retrieve(self, request: Request, name: str) -> Response:
        return _found(name, await self._store.get(name, tenant_of(request)))

    async def update(self, request: Request, name: str) -> Response:
        metadata = (await self._body(request)).metadata
        if metadata is None:
            raise InvalidRequest("'metadata' is needed.", param="metadata")
        return _found(name, await self._store.update(name, tenant_of(request), metadata))

    async def delete(self, request: Request, name: str) -> Response:
        if not await self._store.delete(name, tenant_of(request)):
            raise no_conversation(name)
        return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: Request, name: str) -> Response:
        return JSONResponse(page(await self._all(request, name), request.query_params))

    async def add_items(self, request: Request, name: str) -> Response:
        items = self._items(await self._body(request))
        if not items:
            raise InvalidRequest("'items' must hold at least one item.", param="items")
        must_be_new(items, (), "items")
        known = await self._store.append(name, tenant_of(request), items)
        if known is None:
            raise no_conversation(name)
        must_be_new(items, known, "items")
        return JSONResponse(listed(items, has_more=False))

    async def item(self, request: Request, name: str, item: str) -> Response:
        found = next((one for one in await self._all(request, name) if one["id"] == item), None)
        if found is None:
            raise _no_item(item)
        return JSONResponse(found)

    async def delete_item(self, request: Request, name: str, item: str) -> Response:
        """The conversation without it."""
        found = await self._store.get(name, tenant_of(request))
        if found is not None and not await self._store.delete_item(name, tenant_of(request), item):
            raise _no_item(item)
        return _found(name, found)

    async def _all(self, request: Request, name: str) -> list[Item]:
        items = await self._store.items(name, tenant_of(request))
        if items is None:
            raise no_conversation(name)
        return items

    async def _body(self, request: Request) -> ConversationRequest:
        return read_request(ConversationRequest, await read_json(request, self._served.settings))

    def _items(self, asked: ConversationRequest) -> list[Item]:
        items = read_items(asked.items, self._served.random, "items")
        if len(items) > _MOST_ITEMS:
            raise InvalidRequest(f"'items' may hold at most {_MOST_ITEMS} items.", param="items")
        return items


def _found(name: str, conversation: StoredConversation | None) -> Response:
    if conversation is None:
        raise no_conversation(name)
    return JSONResponse(_conversation(conversation))


def _conversation(stored: StoredConversation) -> Object:
    return {
        "id": stored.id,
        "object": "conversation",
        "created_at": int(stored.created),
        "metadata": stored.metadata,
    }


def _no_item(name: str) -> NotFound:
    return NotFound(f"Item with id {name[:64]!r} not found.")
