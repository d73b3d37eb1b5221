"""What came before a request: along `previous_response_id`, or in its conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schemas.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from services.edge.responses.items import Item
from services.edge.responses.objects import Object, listed
from services.edge.responses.request import ResponsesRequest
from services.edge.store.conversations import SqlConversationStore
from services.edge.store.responses import SqlResponseStore

_MOST_LISTED = 100


async def history(
    asked: ResponsesRequest, tenant: str, responses: SqlResponseStore, conversations: SqlConversationStore
) -> list[Item]:
    """Oldest first. Raises `PreviousResponseNotFound`, `NotFound`, `PayloadTooLarge`, `InvalidRequest`, `StoreUnavailable`."""
    if asked.previous_response_id is not None and asked.conversation is not None:
        text = "Only one of 'previous_response_id' and 'conversation' can say what came before."
        raise InvalidRequest(text, param="previous_response_id")
    if asked.previous_response_id is not None:
        return await _along(asked.previous_response_id, tenant, responses)
    name = asked.conversation_id
    if name is None:
        return []
    items = await conversations.items(name, tenant)
    if items is None:
        raise no_conversation(name, "conversation")
    return items


def no_conversation(name: str, param: str | None = None) -> NotFound:
    return NotFound(f"Conversation with id {name[:64]!r} not found.", param=param)


def page(items: Sequence[Item], asked: Mapping[str, str]) -> Object:
    """A page of `items`, which are oldest first: `limit`, `order` and `after` say which. Raises `InvalidRequest`."""
    limit = number(asked, "limit", 20, 1, _MOST_LISTED)
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := asked.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise InvalidRequest("There is no item with the id in 'after'.", param="after")
        ordered = ordered[place + 1 :]
    return listed(ordered[:limit], has_more=len(ordered) > limit)


def number(asked: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A number of the query. Raises `InvalidRequest`."""
    text = asked.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and least <= int(text) <= most):
        raise InvalidRequest(f"'{name}' must be a number from {least} to {most}.", param=name)
    return int(text)


def yes(asked: Mapping[str, str], name: str) -> bool:
    """Whether the query says so. Raises `InvalidRequest` for what is neither: whoever waits for events reads no object."""
    text = asked.get(name, "false").lower()
    if text not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"'{name}' must be true or false.", param=name)
    return text in ("true", "1")


async def _along(name: str, tenant: str, responses: SqlResponseStore) -> list[Item]:
    found, missing = await responses.history(name, tenant)
    if missing is not None:
        raise PreviousResponseNotFound(f"Previous response with id {missing[:64]!r} not found.", param="previous_response_id")
    if found[-1].running:
        raise InvalidRequest(f"The response {name[:64]!r} has not ended yet.", param="previous_response_id")
    return [item for turn in found for item in turn.items]
