"""An edge with three models behind it, an `auto`, and stand-ins for the largest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from services.settings.selection import SelectionSettings
from services.settings.selection_check import check_selection
from tests.edge.fakes import Api

MODELS = ("a", "b", "c")
SELECTION = SelectionSettings.model_validate(
    {
        "aliases": {"fast": "a", "chat": "auto"},
        "auto": {
            "small": "fast",
            "medium": "b",
            "large": "c",
            "rules": [
                {"use": "large", "hint": "legal"},
                {"use": "large", "code": True},
                {"use": "large", "min_characters": 200},
                {"use": "medium", "min_turns": 3},
                {"use": "medium", "tools": True},
            ],
        },
        "fallback": {"c": {"to": ["b", "fast"]}},
    }
)
check_selection(SELECTION, MODELS)
CODE = "Why does this fail?\n```\nprint(1/0)\n```"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def api(**settings: Any) -> Api:
    return Api(MODELS, SELECTION, **settings)


def user(*texts: str) -> dict[str, Any]:
    """A conversation with so many turns."""
    messages = [message for text in texts for message in (said("user", text), said("assistant", "ok"))]
    return {"messages": messages[:-1]}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def chosen(response: httpx.Response) -> tuple[str | None, str | None]:
    return response.headers.get("x-headrace-model"), response.headers.get("x-headrace-model-reason")


@asynccontextmanager
async def sdk(api: Api, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(api.app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://edge/v1", api_key=key, http_client=http, max_retries=0) as client,
    ):
        yield client
