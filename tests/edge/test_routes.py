"""Every route of an edge, found in the application itself, so that a new one cannot escape what holds for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from starlette.routing import BaseRoute, Route

from services.edge.store.database import Database, database_url
from tests.edge.fakes import Api
from tests.edge.responses.rig import ResponsesApi
from tests.edge.test_api_refusals import check

PROBES = {"/health", "/ready"}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")
UNKNOWN = ("/", "/metrics", "/admin", "/debug", "/v1", "/v1/nothing", "/health/", "/%2e%2e/health", "//health")


@pytest.fixture
async def api(tmp_path: Path) -> ResponsesApi:
    """What an edge serves to callers. Nothing here gets as far as the database."""
    return ResponsesApi(Database(database_url("", tmp_path)))


def routes(found: Iterable[BaseRoute]) -> Iterator[Route]:
    """Those of included routers too. Raises AssertionError for a kind that this test cannot look into."""
    for route in found:
        inner = getattr(route, "original_router", None)  # FastAPI's `include_router`
        if inner is not None:
            yield from routes(inner.routes)
        else:
            assert isinstance(route, Route), f"what is {route}?"
            yield route


def paths(api: Api) -> dict[str, set[str]]:
    """The methods of each path, with something for its parameters."""
    served: dict[str, set[str]] = {}
    for route in routes(api.app.routes):
        served.setdefault(re.sub(r"\{[^}]*\}", "x", route.path), set()).update(route.methods or ())
    return served


async def ask(api: Api, method: str, path: str, peer: str) -> httpx.Response:
    transport = httpx.ASGITransport(api.app, client=(peer, 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        return await client.request(method, path)


async def test_everything_but_the_probes_needs_a_key(api: ResponsesApi) -> None:
    """faults.md, gateway: every route but health needs a key. Also what is there for people, and what is not there: whoever has
    no key does not learn which is which."""
    served = paths(api)
    assert {"/v1/chat/completions", "/v1/responses/x/cancel", "/v1/conversations/x/items/x", "/docs", *PROBES} <= served.keys()
    for path in {*served, *UNKNOWN} - PROBES:
        for method in METHODS:
            answer = await ask(api, method, path, "203.0.113.7")
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                check(answer, 401, code="invalid_api_key")


async def test_the_probes_need_none(api: ResponsesApi) -> None:
    for path in PROBES:
        assert (await ask(api, "GET", path, "203.0.113.7")).status_code == 200


async def test_unknown_paths_and_wrong_methods_have_the_envelope(api: ResponsesApi) -> None:
    """faults.md, gateway: unknown path, HEAD, OPTIONS, wrong method."""
    served = paths(api)
    for path in {*served, *UNKNOWN}:
        for method in METHODS:
            if ("GET" if method == "HEAD" else method) in served.get(path, ()):
                continue
            answer = await ask(api, method, path, "127.0.0.1")
            if method == "HEAD":
                assert answer.status_code in (404, 405), path
            else:
                # a path that another route takes, such as a model called "x", has that one's answer
                check(answer, 405 if path in served else 404)


async def test_head_is_get_without_a_body(api: ResponsesApi) -> None:
    """As load balancers and `curl -I` ask. The HTTP server leaves the body out (test_head_has_no_body)."""
    for app in (api.app, api.admin_app):
        async with api.client(app) as client:
            for path in PROBES:
                assert (await client.head(path)).status_code == 200
                api.traffic.draining = True
                assert [(await client.request(method, "/ready")).status_code for method in ("GET", "HEAD")] == [503, 503]
                api.traffic.draining = False
    got, head = [await ask(api, method, "/v1/models", "127.0.0.1") for method in ("GET", "HEAD")]
    assert (head.status_code, head.headers["content-length"]) == (200, got.headers["content-length"])


async def test_a_wrong_method_is_told_all_that_are_right(api: ResponsesApi) -> None:
    for path, methods in paths(api).items():
        allowed = (await ask(api, "BREW", path, "127.0.0.1")).headers["allow"].split(", ")
        assert methods <= set(allowed), path
        assert ("HEAD" in allowed) == ("GET" in methods), path
    answer = await ask(api, "PUT", "/v1/conversations/x", "127.0.0.1")
    assert answer.headers["allow"] == "GET, POST, DELETE, HEAD"


async def test_who_needs_a_key_is_told_how_to_show_it(api: ResponsesApi) -> None:
    assert (await ask(api, "GET", "/v1/models", "203.0.113.7")).headers["www-authenticate"] == "Bearer"
