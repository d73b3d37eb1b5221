"""The HTTP application that callers reach: its routes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import ModelNotFound
from services.edge.api.admin_app import add_probes
from services.edge.api.chat import ChatCompletions
from services.edge.api.completions import Completions
from services.edge.api.document import REFUSALS, json_body
from services.edge.api.envelope import add_envelope
from services.edge.api.gate import Gate, Traffic
from services.edge.api.head import Head
from services.edge.api.measure import Measure
from services.edge.api.plain import post
from services.edge.api.request import ChatRequest, CompletionRequest
from services.edge.api.served import Served
from services.edge.api.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from services.edge.gate.door import Door
from services.edge.selection.policy import must_be_offered, offered, without_adapter


def create_app(served: Served, traffic: Traffic, door: Door, new_id: Callable[[], str]) -> FastAPI:
    """`new_id` names a request whose client did not."""
    app = FastAPI(title="Headrace", redoc_url=None, redirect_slashes=False, responses=REFUSALS)
    new_measure = partial(Measure, served.metrics, served.clock)
    app.add_middleware(Gate, traffic=traffic, door=door, meter=served.meter, new_id=new_id, new_measure=new_measure)
    app.add_middleware(Head)
    add_envelope(app)
    chat, completions, tokens = ChatCompletions(served), Completions(served), Tokens(served)
    name = served.text.name
    chat_example = {"model": name, "messages": [{"role": "user", "content": "What is Kubernetes?"}], "max_tokens": 100}
    raw_example = {"model": name, "prompt": "Once upon a time", "max_tokens": 100}

    @post(app, "/v1/chat/completions", json_body(ChatRequest, ["model", "messages"], **chat_example))
    async def chat_completions(request: Request) -> Response:
        """As OpenAI's; with `stream` the answer comes as server-sent events."""
        return await chat(request)

    @post(app, "/v1/completions", json_body(CompletionRequest, ["model", "prompt"], **raw_example))
    async def text_completions(request: Request) -> Response:
        """As OpenAI's older endpoint: raw text, or token ids, in."""
        return await completions(request)

    @post(app, "/tokenize", json_body(TokenizeRequest, [], model=name, prompt="Hello"))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of chat messages."""
        return await tokens.tokenize(request)

    @post(app, "/detokenize", json_body(DetokenizeRequest, ["tokens"], model=name, tokens=[1, 2, 3]))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await tokens.detokenize(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        names = offered(served.names, served.alive, request.state.caller.models)
        adapted = [f"{name}:{adapter}" for name in names for adapter in served.adapters(name)]
        return JSONResponse({"object": "list", "data": [_model(served, name) for name in (*names, *adapted)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        name, adapter = without_adapter(served.names, model)
        must_be_offered(served.names, name, served.alive, request.state.caller.models)
        if adapter is not None and adapter not in served.adapters(served.selection.follow(name)[-1]):
            raise ModelNotFound(f"The model {name!r} has no adapter {adapter!r}.", param="model")
        return JSONResponse(_model(served, model))

    add_probes(app, served, traffic)
    return app


def _model(served: Served, name: str) -> dict[str, Any]:
    """As OpenAI's; `root` (vLLM's) says what an alias stands for, and of which model it is an adapter."""
    told = {"id": name, "object": "model", "created": served.started, "owned_by": "headrace"}
    end = served.selection.follow(without_adapter(served.names, name)[0])[-1]
    return told if end == name else {**told, "root": end}
