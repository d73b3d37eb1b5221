"""The chat API over NATS when somebody is lost: the server, one edge of two, a caller that does not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError

from schemas.state import Capabilities
from tests.edge.cluster import process
from tests.edge.fakes import MODEL, Api, Script
from tests.edge.nats_rig import CHAT, Call, caller, edge, stranger
from tests.infra.accounts import AccountServer
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

FOREVER = Script([byte_ids("a")], finish=None, pause_s=0.02, forever=True)
HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AccountServer]:
    with AccountServer(tmp_path, tenants=("acme", "zenith")) as running:
        yield running


async def test_the_server_starts_anew(server: AccountServer) -> None:
    """It has forgotten where the answers lead: a stream is given up, and new requests are answered."""
    async with edge(server, loses_it=True) as api:
        api.jobs.scripts = [FOREVER]
        async with caller(server, "acme") as client:
            call = await Call(client).send(stream=True)
            await until(lambda: call.got)
            server.restart()
            await until(api.jobs.handles[0].cancelled.is_set)
            await until(lambda: api.traffic.running == 0)
        async with caller(server, "zenith") as other, asyncio.timeout(PATIENCE_S):
            assert (await answered(other))["choices"]


async def test_of_two_edges_each_answers_its_own(server: AccountServer) -> None:
    """A cancel is heard by both and heeded by one; when one edge is gone, the other gets what comes."""
    async with edge(server, most=64) as second, caller(server, "acme") as client:
        second.jobs.default = FOREVER
        async with edge(server, most=64, name=process("edge2"), drain_s=0.0) as first:
            first.jobs.default = FOREVER
            calls = [await Call(client).send(stream=True) for _ in range(24)]
            await until(lambda: all(call.got for call in calls))
            assert len(first.jobs.handles) + len(second.jobs.handles) == 24
            assert first.jobs.handles
            assert second.jobs.handles
            for call in calls[:12]:
                assert (await client.request(call.headers["Headrace-Cancel"], b"", timeout=PATIENCE_S)).data == b"{}"
            await until(lambda: _cancelled(first) + _cancelled(second) == 12)
            await until(lambda: all(not call.got[-1].data for call in calls[:12]))
            assert not any(msg.data == b"" for call in calls[12:] for msg in call.got)
        before = len(second.jobs.handles)
        more = [await Call(client).send(stream=True) for _ in range(8)]
        await until(lambda: all(call.got for call in more))
        assert len(second.jobs.handles) == before + 8


async def test_a_caller_that_does_not_read_is_cut_off_and_slows_nobody(server: AccountServer) -> None:
    async with edge(server) as api, stranger(server, "acme") as deaf, caller(server, "zenith") as client:
        api.jobs.capabilities = Capabilities(logprobs=True)
        api.jobs.scripts = [Script([byte_ids("x" * 200)], finish=None, pause_s=0.05, forever=True), FOREVER]
        deaf.listen(b"mine")
        body = {**HI, "stream": True, "logprobs": True, "top_logprobs": 20}
        deaf.publish(CHAT.encode(), b"", json.dumps(body).encode(), b"mine")
        await until(lambda: api.jobs.handles)
        call = await Call(client).send(stream=True)
        await until(api.jobs.handles[0].cancelled.is_set, timeout=4 * PATIENCE_S)
        seen = len(call.got)
        await until(lambda: len(call.got) > seen + 20)
        assert not api.jobs.handles[1].cancelled.is_set()


async def answered(client: Client) -> dict[str, Any]:
    """The answer to a request, as soon as an edge listens."""
    while True:
        try:
            msg = await client.request(CHAT, json.dumps(HI).encode(), timeout=PATIENCE_S)
            return dict(json.loads(msg.data))
        except NoRespondersError:
            await asyncio.sleep(0.02)


def _cancelled(api: Api) -> int:
    return sum(handle.cancelled.is_set() for handle in api.jobs.handles)
