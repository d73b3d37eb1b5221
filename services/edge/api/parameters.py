"""A request and what its model can do → how tokens are drawn. Pure functions.

Invariant: nothing that changes the answer is ignored: what the model's engine cannot honour is refused by name.
"""

from __future__ import annotations

from typing import Any

from schemas.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from schemas.job import U64, Grammar, Sampling
from schemas.state import Capabilities
from services.edge.api.prompts import read_ids
from services.edge.api.request import ChatRequest, CompletionRequest, GenerationRequest
from services.settings.edge import EdgeSettings
from services.text.assets import GenerationDefaults

_PER_CHOICE = 64
"""Tokens of room that a choice may need beside its own: the blocks it fills in part."""


def refuse_unsupported(request: GenerationRequest, capabilities: Capabilities) -> None:
    """Raises `UnsupportedParameter` for the first field that would have to be ignored."""
    if isinstance(request, ChatRequest):
        _refuse(_of_chat(request, capabilities))
    if isinstance(request, CompletionRequest):
        _refuse(_of_completion(request, capabilities))
    _refuse(_of_both(request, capabilities))


_Asked = dict[str, tuple[bool, bool]]
"""By field: whether the request wants it, whether it can be had."""


def _refuse(asked: _Asked) -> None:
    for name, (wanted, offered) in asked.items():
        if wanted and not offered:
            raise UnsupportedParameter(f"This model does not support '{name}'.", param=name)


def _of_both(request: GenerationRequest, capabilities: Capabilities) -> _Asked:
    format_ = request.response_format or {"type": "text"}
    return {
        "response_format": (format_.get("type") != "text", format_.get("type") in capabilities.grammar),
        "logprobs": (request.alternatives is not None, capabilities.logprobs),
        "prompt_logprobs": (request.prompt_logprobs is not None, capabilities.prompt_logprobs),
        "seed": (request.seed is not None, capabilities.seed),
        "presence_penalty": (bool(request.presence_penalty), capabilities.penalties),
        "frequency_penalty": (bool(request.frequency_penalty), capabilities.penalties),
        "repetition_penalty": (request.repetition_penalty not in (None, 1), capabilities.penalties),
        "min_p": (bool(request.min_p), capabilities.min_p),
        "best_of": (request.best_of not in (None, request.n or 1), False),
        "top_k": ((request.top_k or 0) > 0, capabilities.top_k),
        "logit_bias": (bool(request.logit_bias), capabilities.logit_bias),
    }


def _of_chat(request: ChatRequest, capabilities: Capabilities) -> _Asked:
    return {
        "functions": (bool(request.functions), False),
        "tool_choice": (request.tool_choice not in (None, "none", "auto"), "grammar" in capabilities.grammar),
        "function_call": (request.function_call not in (None, "none", "auto"), False),
        "modalities": (request.modalities not in (None, ["text"]), False),
        "audio": (request.audio is not None, False),
        "prediction": (request.prediction is not None, False),
        "web_search_options": (request.web_search_options is not None, False),
        "top_logprobs": (bool(request.top_logprobs), capabilities.logprobs),
    }


def _of_completion(request: CompletionRequest, capabilities: Capabilities) -> _Asked:
    return {
        "echo": (bool(request.echo) and request.logprobs is not None, capabilities.prompt_logprobs),
        "suffix": (bool(request.suffix), False),
    }


def choices(request: GenerationRequest, limit: int, settings: EdgeSettings, room: int | None) -> int:
    """How many choices a request gets, each of up to `limit` tokens, in a KV pool with `room` tokens beside the prompt
    (None: not known).

    Raises `InvalidRequest` when that is too much at once: a run that outgrows every pool could only fail late.
    """
    n = request.n or 1
    if n > settings.max_choices:
        raise InvalidRequest(f"'n' is {n}; at most {settings.max_choices} choices are allowed.", param="n")
    most = settings.max_generated_tokens
    if room is not None:
        most = min(most, max(0, room - n * _PER_CHOICE))
    if n > 1 and n * limit > most:
        text = f"{n} choices of up to {limit} tokens are more than the {most} that one request may generate; lower 'max_tokens'."
        raise InvalidRequest(text, param="n")
    return n


def must_be_scorable(request: GenerationRequest, prompt_tokens: int, most: int) -> None:
    """Raises `InvalidRequest` for more log-probabilities of a prompt than `most`, alternatives included."""
    alternatives = request.prompt_alternatives
    if alternatives is not None and prompt_tokens * (1 + alternatives) > most:
        text = f"{prompt_tokens} prompt tokens with {alternatives} alternatives each are more than the {most} values allowed."
        raise InvalidRequest(text, param="prompt_logprobs")


def max_tokens(asked: int | None, prompt_tokens: int, context_length: int, *, param: str) -> int:
    """How many tokens may be generated: what was asked for, clamped to what remains of the context.

    Raises `ContextLengthExceeded`, which names `param`, when nothing remains.
    """
    remaining = context_length - prompt_tokens
    if remaining < 1:
        text = f"This model's context is {context_length} tokens; your {param} came to {prompt_tokens} tokens."
        raise ContextLengthExceeded(text, param=param)
    return min(asked, remaining) if asked else remaining


def sampling(
    request: GenerationRequest,
    limit: int,
    seed: int,
    vocabulary: int,
    defaults: GenerationDefaults,
    grammar: Grammar | None = None,
) -> Sampling:
    """`limit`: as `max_tokens` gives it; `seed`: drawn for a request that has none; `vocabulary`: how many token ids there are;
    `grammar`: of its `response_format`; `defaults`: the model's own, for what the request leaves open.

    Raises `InvalidRequest`.
    """
    if (request.min_tokens or 0) > limit:
        raise InvalidRequest(f"'min_tokens' is more than the {limit} tokens that may be generated.", param="min_tokens")
    return Sampling(
        seed=seed if request.seed is None else request.seed % U64,
        max_tokens=limit,
        min_tokens=request.min_tokens or 0,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p),
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias or {}, vocabulary),
        stop_token_ids=tuple(read_ids(request.stop_token_ids or [], "stop_token_ids", vocabulary)),
        ignore_eos=request.ignore_eos or False,
        logprobs=request.alternatives,
        prompt_logprobs=request.prompt_alternatives,
        grammar=grammar,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _bias(value: dict[str, Any], vocabulary: int) -> dict[int, float]:
    bias = {}
    for key, amount in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocabulary):
            raise InvalidRequest(f"'logit_bias' holds {key[:20]!r}, which is no token id.", param="logit_bias")
        bias[int(key)] = float(amount)
    return bias
