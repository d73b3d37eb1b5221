"""Endpoints that take the request as it is and make the response: FastAPI documents them, and has nothing to do for them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class _Plain(APIRoute):
    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        return endpoint


def post(app: FastAPI, path: str, openapi_extra: dict[str, Any]) -> Callable[[Endpoint], Endpoint]:
    """As `app.post`, without what solves parameters and serialises results, which costs a request as much as its tokenizer."""

    def add(endpoint: Endpoint) -> Endpoint:
        app.router.add_api_route(path, endpoint, methods=["POST"], openapi_extra=openapi_extra, route_class_override=_Plain)
        return endpoint

    return add
