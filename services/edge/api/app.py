"""The HTTP application: routes, and the envelope of everything that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import BusUnavailable, HeadraceError, Unavailable
from services.edge.api.body import ClientGone
from services.edge.api.chat import ChatCompletions
from services.edge.api.completions import Completions
from services.edge.api.errors import error_response, from_status
from services.edge.api.gate import Gate, Traffic
from services.edge.api.served import Served
from services.edge.api.tokens import Tokens
from services.edge.gate.door import Door
from services.edge.selection.policy import must_be_offered, offered

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_CLIENT_GONE = 499


def create_app(served: Served, traffic: Traffic, door: Door, new_id: Callable[[], str]) -> FastAPI:
    """`new_id` names a request whose client did not."""
    app = FastAPI(title="Headrace", redoc_url=None, redirect_slashes=False)
    app.add_middleware(Gate, traffic=traffic, door=door, meter=served.meter, new_id=new_id)
    app.add_exception_handler(HeadraceError, _refused)
    app.add_exception_handler(HTTPException, _framework_refused)
    app.add_exception_handler(ClientGone, _nobody_there)
    chat, completions, tokens = ChatCompletions(served), Completions(served), Tokens(served)

    @app.post("/v1/chat/completions", openapi_extra=json_body(_chat_example(served.text.name), ["model", "messages"]))
    async def chat_completions(request: Request) -> Response:
        """As OpenAI's; with `stream` the answer comes as server-sent events."""
        return await chat(request)

    @app.post("/v1/completions", openapi_extra=json_body(_completion_example(served.text.name), ["model", "prompt"]))
    async def text_completions(request: Request) -> Response:
        """As OpenAI's older endpoint: raw text, or token ids, in."""
        return await completions(request)

    @app.post("/tokenize", openapi_extra=json_body({"model": served.text.name, "prompt": "Hello"}, []))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of chat messages."""
        return await tokens.tokenize(request)

    @app.post("/detokenize", openapi_extra=json_body({"model": served.text.name, "tokens": [1, 2, 3]}, ["tokens"]))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await tokens.detokenize(request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        names = offered(served.names, served.alive, request.state.caller.models)
        return JSONResponse({"object": "list", "data": [_model(served, name) for name in names]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str, request: Request) -> Response:
        must_be_offered(served.names, model, served.alive, request.state.caller.models)
        return JSONResponse(_model(served, model))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(model: str | None = None) -> Response:
        """Whether some model can be served, or a certain one."""
        if traffic.draining:
            raise Unavailable("The server takes no new requests now.", retry_after=1.0)
        if not served.jobs.connected:
            raise BusUnavailable("The service is reconnecting.", retry_after=1.0)
        if not (served.alive if model is None else model in served.alive):
            raise Unavailable("No worker serves the model now.", retry_after=1.0)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.prometheus_text(), media_type=_PROMETHEUS)

    return app


def _chat_example(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "What is Kubernetes?"}], "max_tokens": 100}


def _completion_example(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 100}


def json_body(example: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """For the interactive documentation: bodies are read by `body` and `request`, not by the framework."""
    schema = {"type": "object", "required": required, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _model(served: Served, name: str) -> dict[str, Any]:
    """As OpenAI's; `root` (vLLM's) says what an alias stands for."""
    told = {"id": name, "object": "model", "created": served.started, "owned_by": "headrace"}
    end = served.selection.follow(name)[-1]
    return told if end == name else {**told, "root": end}


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return error_response(error)


async def _framework_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(from_status(error.status_code, request.method, request.url.path))
    response.headers.update(error.headers or {})
    return response


async def _nobody_there(_: Request, __: Exception) -> Response:
    return Response(status_code=_CLIENT_GONE)
