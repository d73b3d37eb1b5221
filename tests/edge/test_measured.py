"""Every request to generate is in the request metrics once, whoever refused it, with labels that no caller can multiply."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from schemas.errors import HeadraceError, JobFailed, Overloaded, RateLimited, Unavailable
from services.edge.gate.limits import Limits
from services.settings.selection import SelectionSettings
from tests.edge.fakes import MODEL, Api, Script, says
from tests.text.tiny import byte_ids

PATHS = ("/v1/chat/completions", "/v1/completions")
FALLBACK = SelectionSettings.model_validate(
    {"aliases": {"nice": "a"}, "auto": {"small": "a", "large": "b"}, "fallback": {"a": {"to": ["b"]}}}
)


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "hi"} if path == PATHS[1] else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": MODEL, **prompt, **fields}


async def sent(api: Api, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    async with api.client() as client:
        return await client.post(path, json=body(path, **fields), headers=headers)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (MODEL, "stop", "200")),
        ({"stream": True}, (MODEL, "stop", "200")),
        ({"model": "none of ours"}, ("unknown", "model_not_found", "404")),
        ({"model": 7}, ("unknown", "invalid_value", "400")),
        ({"temperature": 9}, (MODEL, "invalid_value", "400")),
        ({"stop": [""]}, (MODEL, "invalid_value", "400")),
        ({"suffix": "x", "functions": [{}]}, (MODEL, "unsupported_parameter", "400")),
        ({"messages": [], "prompt": []}, (MODEL, "empty_array", "400")),
        ({"messages": [{"role": "user", "content": "x" * 999}], "prompt": "x" * 999}, (MODEL, "context_length_exceeded", "400")),
    ],
)
async def test_whatever_is_asked_counts_once(path: str, fields: dict[str, Any], expected: tuple[str, str, str]) -> None:
    api = Api()
    assert str((await sent(api, path, **fields)).status_code) == expected[2]
    assert api.counted() == {expected: 1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refusal", [Unavailable("x"), Overloaded("x"), RateLimited("x"), JobFailed("x")])
async def test_a_refusal_of_a_router_counts_once(path: str, stream: bool, refusal: HeadraceError) -> None:
    api = Api()
    api.jobs.scripts = [Script(refuse=refusal)]
    assert (await sent(api, path, stream=stream)).status_code == refusal.status
    assert api.counted() == {(MODEL, refusal.code, str(refusal.status)): 1}


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_within_a_stream_is_a_failure_with_status_200(path: str) -> None:
    api = Api()
    api.jobs.scripts = [Script([byte_ids("a")], error=JobFailed("x"))]
    assert (await sent(api, path, stream=True)).status_code == 200
    assert api.counted() == {(MODEL, "job_failed", "200"): 1}


@pytest.mark.parametrize("path", PATHS)
async def test_with_other_models_to_answer_it_counts_once_and_for_who_did(path: str) -> None:
    api = Api(("a", "b"), FALLBACK)
    api.jobs.scripts = [Script(refuse=Unavailable("x")), says("ok")]
    assert (await sent(api, path, model="nice")).status_code == 200
    assert api.counted() == {("b", "stop", "200"): 1}


@pytest.mark.parametrize("path", PATHS)
async def test_when_nobody_takes_it_it_counts_once_too(path: str) -> None:
    api = Api(("a", "b"), FALLBACK)
    api.jobs.default = Script(refuse=Overloaded("x"))
    assert (await sent(api, path, model="nice")).status_code == 503
    assert api.counted() == {("a", "overloaded", "503"): 1}
    api.jobs.alive = set()
    assert (await sent(api, path, model="auto")).status_code == 503
    assert api.counted() == {("a", "overloaded", "503"): 1, ("a", "no_capacity", "503"): 1}


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_refused_before_it_is_read_counts(path: str) -> None:
    api = Api(max_body_bytes=1000)
    async with api.client() as client:
        refused = [
            await client.post(path, content=b"{"),
            await client.post(path, content=b"{}", headers={"content-type": "text/plain"}),
            await client.post(path, content=b" " * 2000),
            await client.post(path, json=body(path), headers={"authorization": "Bearer hr-none"}),
        ]
        api.traffic.draining = True
        refused.append(await client.post(path, json=body(path)))
    codes = [(answer.json()["error"]["code"], str(answer.status_code)) for answer in refused]
    assert [status for _, status in codes] == ["400", "415", "413", "401", "503"]
    assert api.counted() == {("unknown", code, status): 1 for code, status in codes}


@pytest.mark.parametrize("path", PATHS)
async def test_a_callers_limit_counts(path: str) -> None:
    api = Api()
    headers = {"authorization": f"Bearer {api.keys.make(limits=Limits(requests_per_minute=1))}"}
    for _ in range(3):
        await sent(api, path, headers)
    assert api.counted() == {(MODEL, "stop", "200"): 1, ("unknown", "rate_limit_exceeded", "429"): 2}  # they were not read


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_of_ours_counts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api()

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(api.jobs, "start", fails)
    assert (await sent(api, path)).status_code == 500
    assert api.counted() == {(MODEL, "internal_error", "500"): 1}


async def test_what_generates_nothing_does_not_count() -> None:
    api = Api()
    async with api.client() as client:
        await client.get("/v1/models")
        await client.get(PATHS[0])
        await client.post("/tokenize", json={"prompt": "hi"})
        await client.post("/v1/nothing", json={})
    assert api.counted() == {}


async def test_no_caller_makes_series() -> None:
    """faults.md, privacy: metrics labels: whatever callers say, and whoever they say they are, there are no more series."""
    api = Api()
    key = api.keys.make()

    async def everything(word: str) -> None:
        headers = {"authorization": f"Bearer {key}", "x-request-id": word, "user-agent": word, "openai-organization": word}
        for path in PATHS:
            for fields in (
                {"user": word},
                {"metadata": {word: word}},
                {"model": word},
                {"model": f"{MODEL}:{word}"},
                {word: word},
            ):
                await sent(api, path, headers, **fields)
            await sent(api, path, headers | {"authorization": f"Bearer hr-{word}"})
        async with api.client() as client:
            await client.request(f"BREW-{word}", f"/v1/{word}?{word}", headers=headers)

    def series() -> set[str]:
        lines = api.metrics.prometheus_text().decode().splitlines()
        return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}

    await everything("first")
    before = series()
    assert any("headrace_requests_total" in one for one in before)
    for number in range(20):
        await everything(f"word{number}")
    assert series() == before
