"""The operators' port: metrics and probes, and nothing else; probes are to be had on the callers' port too."""

from __future__ import annotations

import httpx
import pytest

from schemas.errors import HeadraceError
from tests.edge.fakes import Api, says


def check(response: httpx.Response, status: int, code: str | None = None) -> None:
    """A refusal in the envelope."""
    error = response.json()["error"]
    assert (response.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert code in (None, error["code"])


async def test_metrics_count_outcomes() -> None:
    api = Api()
    await api.post()
    script = says("x")
    script.refuse = HeadraceError("no")
    api.jobs.scripts = [script]
    await api.post()
    async with api.client(api.admin_app) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'headrace_requests_total{model="tiny",outcome="stop"' in response.text
    assert 'outcome="internal_error"' in response.text
    assert "headrace_time_to_first_token_seconds_bucket" in response.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/docs", "/openapi.json", "/"])
async def test_it_has_nothing_of_the_api(path: str) -> None:
    api = Api()
    async with api.client(api.admin_app) as client:
        check(await client.get(path), 404)


@pytest.mark.parametrize("public", [True, False])
async def test_probes(public: bool) -> None:
    api = Api()
    async with api.client(api.app if public else api.admin_app) as client:
        assert (await client.get("/ready")).json() == {"status": "ready"}
        check(await client.put("/ready"), 405)
        api.traffic.draining = True
        check(await client.get("/ready"), 503, code="no_capacity")
        api.traffic.draining, api.jobs.served = False, False
        check(await client.get("/ready"), 503, code="no_capacity")
        api.jobs.connected = False
        check(await client.get("/ready"), 503, code="bus_unavailable")
        assert (await client.get("/health")).json() == {"status": "ok"}  # nothing of this is cured by a restart
