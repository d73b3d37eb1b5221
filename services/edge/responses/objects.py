"""The response object: as it begins, and as it ends. Pure functions. Source: the OpenAI API reference, "The response object"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.errors import HeadraceError, RateLimited
from services.edge.api.service_tier import service_tier
from services.edge.api.usage import Usage
from services.edge.jobs.draft import Draft
from services.edge.responses.items import Item
from services.edge.responses.request import ResponsesRequest

Object = dict[str, Any]
RUNNING = ("queued", "in_progress")


def begun(name: str, created: int, asked: ResponsesRequest, draft: Draft) -> Object:
    """`draft`: of its job, whose sampling holds where the request leaves it open."""
    conversation, sampling = asked.conversation_id, draft.sampling
    return {
        "id": name,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "queued" if asked.background else "in_progress",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "conversation": None if conversation is None else {"id": conversation},
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": service_tier(draft.tier),
        "store": asked.stored,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **_given(asked.text or {})},
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": [{"description": None, "parameters": None, "strict": False, **tool} for tool in asked.tools or ()],
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }


def ended(response: Object, at: int, output: Sequence[Item], usage: Usage, *, cut: bool) -> Object:
    """`cut`: at a limit of tokens."""
    changed = {
        "status": "incomplete" if cut else "completed",
        "completed_at": None if cut else at,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": _usage(usage),
    }
    return {**response, **changed}


def failed(response: Object, output: Sequence[Item], error: HeadraceError) -> Object:
    code = "rate_limit_exceeded" if isinstance(error, RateLimited) else "server_error"
    return {**response, "status": "failed", "output": list(output), "error": {"code": code, "message": error.message}}


def cancelled(response: Object, output: Sequence[Item] = ()) -> Object:
    return {**response, "status": "cancelled", "output": list(output)}


def listed(items: Sequence[Item], *, has_more: bool) -> Object:
    """A page of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": has_more}


def _given(fields: Object) -> Object:
    return {name: value for name, value in fields.items() if value is not None}


def _usage(usage: Usage) -> Object:
    cost = {} if usage.cost is None else {"cost": usage.cost}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **cost,
    }
