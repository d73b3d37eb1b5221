"""A body that is wrong in very many places is refused for the first of them: the others cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from schemas.errors import InvalidRequest
from services.edge.api.request import ChatRequest, CompletionRequest
from services.edge.api.tokens import DetokenizeRequest, TokenizeRequest
from services.edge.responses.conversations import ConversationRequest
from services.edge.responses.request import ResponsesRequest

KINDS = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ResponsesRequest, ConversationRequest]
FEW, MANY = 32, 100
LISTS: list[Any] = [[1] * MANY, ["x"] * MANY, [None] * MANY]
OBJECTS: list[Any] = [{f"k{at}": [] for at in range(MANY)}, {f"{at:099}": 1 for at in range(MANY)}]
NEEDED = {"model": "tiny", "tokens": [1]}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_field_is_looked_through_for_all_that_is_wrong_with_it(kind: type[BaseModel]) -> None:
    """Telling 200,000 errors takes a second, in which nobody else is served."""
    counts = [errors(kind, {**NEEDED, name: value}) for name in kind.model_fields for value in (*LISTS, *OBJECTS)]
    assert 1 <= max(counts) <= FEW


def errors(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """How many were found."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except InvalidRequest:
        return 1
    return 0
