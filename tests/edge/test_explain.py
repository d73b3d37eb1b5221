"""`x-headrace-explain`: who asks is told where the request went and why, no more than it may see, and in a bounded header."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
from msgspec.structs import replace

from schemas.codec import encode
from schemas.errors import RateLimited, Unavailable
from schemas.explanation import MOST, Candidate, Explanation, PassedOver, Terms
from schemas.lifecycle import State
from schemas.placement import Accepted, Queue, Refused
from services.edge.api import explain_header
from services.edge.api.explain_header import MOST_BYTES
from services.edge.jobs.draft import Draft
from services.edge.jobs.explained import Explain, told
from services.settings.selection import SelectionSettings
from tests.edge.cluster import DECODE, PREFILL, ROUTER, Cluster, draft
from tests.edge.fakes import Api, Script, says

ASKS = {"x-headrace-explain": "1"}
SAID = Explanation(
    router="r1-x",
    outcome="placed",
    prefill="p2-x",
    decode="d1-x",
    why=Terms(uncached=40, ttft_s=0.5, wait_s=0.25, load=0.5, kv=0.25),
    candidates=(
        Candidate(process="p2-x", does="prefill", cost=0.5, cached=16),
        Candidate(process="p1-x", does="prefill", cost=0.75, cached=0),
        Candidate(process="d1-x", does="decode", cost=0.5, cached=0),
    ),
    passed_over=(PassedOver(process="d2-x", why="no_credit"),),
)


def test_with_a_key_nothing_is_told_of_load() -> None:
    seen = told(SAID, Explain.WORKERS)
    assert seen is not None
    assert [(one.process, one.cost, one.cached) for one in seen.candidates] == [
        ("p2-x", None, 16),
        ("d1-x", None, 0),
    ]
    assert seen.why == Terms(uncached=40)
    assert not seen.passed_over
    assert (seen.prefill, seen.decode, seen.outcome) == ("p2-x", "d1-x", "placed")
    text = explain_header.value(seen).decode()
    assert not any(word in text for word in ("cost", "ttft_s", "wait_s", "load", "kv", "no_credit"))


def test_with_a_key_it_does_not_show_who_else_has_credit() -> None:
    others_full = replace(SAID, candidates=tuple(one for one in SAID.candidates if one.process != "p1-x"))
    assert told(SAID, Explain.WORKERS) == told(others_full, Explain.WORKERS)
    waits = replace(SAID, outcome="queue", reason="no_credit", prefill="", decode="", why=None)
    seen = told(waits, Explain.WORKERS)
    assert seen is not None
    assert not seen.candidates


def test_who_does_not_ask_is_told_nothing() -> None:
    assert told(SAID, Explain.NOTHING) is None
    assert told(None, Explain.ALL) is None


def test_the_header_is_bounded_ascii() -> None:
    many = tuple(
        Candidate(process=f"worker-{number:03}-0k3v9x00abcde", does=does, cost=number / 3, cached=number)
        for does in ("prefill", "decode", "alone", "tail")
        for number in range(MOST)
    )
    over = tuple(PassedOver(process=f"other-{number:03}-0k3v9x00abcde", why="no_credit") for number in range(MOST))
    value = explain_header.value(replace(SAID, candidates=many, passed_over=over, reason="ä\n" * 500))
    assert len(value) <= MOST_BYTES
    assert value.isascii()
    assert b"\n" not in value
    read = json.loads(value)
    assert {one["does"] for one in read["candidates"]} == {"prefill", "decode", "alone", "tail"}
    assert min(one["cost"] for one in read["candidates"]) == 0.0, "the best are kept"
    assert read["left_out"] + len(read["candidates"]) + len(read["passed_over"]) == len(many) + len(over)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_who_asks_is_told(path: str, stream: bool) -> None:
    api = Api()
    api.jobs.default = explained(says("hi"))
    body: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "hi"}
    async with api.client() as client:
        asked = await client.post(path, json={"model": "tiny", "stream": stream, **body}, headers=ASKS)
        plain = await client.post(path, json={"model": "tiny", "stream": stream, **body})
    assert asked.status_code == 200
    assert json.loads(asked.headers["x-headrace-explain"])["why"]["ttft_s"] == 0.5
    assert "x-headrace-explain" not in plain.headers


async def test_a_key_sees_less() -> None:
    api = Api()
    api.jobs.default = explained(says("hi"))
    headers = {**ASKS, "authorization": f"Bearer {api.keys.make()}"}
    async with api.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        asked = await client.post("/v1/chat/completions", json=body, headers=headers)
    said = json.loads(asked.headers["x-headrace-explain"])
    assert said["why"] == {"uncached": 40}
    assert "passed_over" not in said


async def test_who_is_refused_is_told_as_well() -> None:
    api = Api()
    refused = Script(refuse=Unavailable("No worker can take this request now.", retry_after=3.0))
    refused.explanation = Explanation(router="r1-x", outcome="refused", reason="no room", retry_after=3.0)
    api.jobs.default = refused
    async with api.client() as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        asked = await client.post("/v1/chat/completions", json=body, headers=ASKS)
    assert asked.status_code == 503
    assert json.loads(asked.headers["x-headrace-explain"])["reason"] == "no room"


async def test_of_several_models_the_one_whose_refusal_it_is_is_told() -> None:
    api = Api(("a", "b"), SelectionSettings.model_validate({"fallback": {"b": {"to": ["a"]}}}))
    final, passed = (Script(refuse=error) for error in (RateLimited("Too many.", retry_after=3.0), Unavailable("Full.")))
    passed.explanation = Explanation(router="r1-x", outcome="refused", reason="b is full")
    final.explanation = Explanation(router="r1-x", outcome="refused", reason="a has no place")
    body = {"model": "b", "messages": [{"role": "user", "content": "x"}]}
    async with api.client() as client:
        api.jobs.scripts = [passed, final]
        asked = await client.post("/v1/chat/completions", json=body, headers=ASKS)
        api.jobs.scripts = [passed, passed]
        nobody = await client.post("/v1/chat/completions", json=body, headers=ASKS)
        api.jobs.scripts = [passed]
        taken = await client.post("/v1/chat/completions", json=body, headers=ASKS)
    assert (asked.status_code, asked.headers["x-headrace-model"]) == (429, "a")
    assert json.loads(asked.headers["x-headrace-explain"])["reason"] == "a has no place"
    assert (nobody.status_code, nobody.headers["x-headrace-model"]) == (503, "b")
    assert json.loads(nobody.headers["x-headrace-explain"])["reason"] == "b is full"
    assert taken.status_code == 200
    assert "x-headrace-explain" not in taken.headers, "its router said nothing"


def explained(script: Script) -> Script:
    script.explanation = SAID
    return script


def asking() -> Draft:
    return dataclasses.replace(draft(), explain=Explain.ALL)


async def test_a_router_is_asked_and_waited_for_though_a_worker_was_faster(cluster: Cluster) -> None:
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    assert job.explain
    cluster.own(PREFILL, job, 7)
    admitted = asyncio.ensure_future(handle.admitted())
    await asyncio.sleep(0)  # a router has 300 ms
    assert handle._job.owned
    assert not admitted.done()
    answer = Accepted(run=7, prefill=PREFILL, decode=DECODE, router=ROUTER, explanation=SAID)
    cluster.bus.publish(cluster.inboxes[0], encode(answer))
    await admitted
    assert handle.explanation == SAID
    handle.cancel()
    cluster.event(PREFILL, job, 7, 1, State.CANCELLED)


async def test_what_waits_or_is_refused_is_explained(cluster: Cluster) -> None:
    waits, refused = replace(SAID, outcome="queue", reason="no_credit"), replace(SAID, outcome="refused", reason="full")
    cluster.answers = [
        Queue(router=ROUTER, explanation=waits),
        Refused(code="no_capacity", reason="full", retry_after=2.0, explanation=refused),
    ]
    queued = cluster.edge.start(asking())
    await queued.admitted()
    assert queued.explanation == waits
    queued.cancel()
    other = cluster.edge.start(asking())
    with pytest.raises(Unavailable):
        await other.admitted()
    assert other.explanation == refused


async def test_a_router_that_does_not_know_the_question_keeps_nobody_waiting(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(asking())
    await handle.admitted()
    assert handle.explanation is None
    handle.cancel()


async def test_nobody_is_asked_unless_the_caller_does(cluster: Cluster) -> None:
    cluster.answers = [Queue(router=ROUTER)]
    handle = cluster.edge.start(draft())
    assert not (await cluster.submitted(1)).explain
    handle.cancel()
