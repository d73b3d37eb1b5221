"""One key, three edges, a real JetStream: what they admit together never passes the key's limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from schemas.job import Tier
from schemas.subjects import Subjects
from services.bus.counters import Counters
from services.bus.jetstream import JetStream
from services.bus.nats_bus import connect
from services.edge.gate.allotment import SLICES
from services.edge.gate.limits import Limits
from tests.edge.fakes import Api
from tests.edge.test_api_keys import CHAT
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S

LIMIT, ASKED = 100, 500
PATH = "/v1/chat/completions"
NAMES = ("e1-0000000000000", "e2-0000000000000", "e3-0000000000000")


@asynccontextmanager
async def three(server: NatsServer, timeout: float) -> AsyncIterator[list[Api]]:
    """Edges that share keys and counters, as those of one database and one NATS do. `timeout`: of what asks the counters."""
    made: list[Api] = []
    async with AsyncExitStack() as stack:
        for name in NAMES:
            bus = await connect([server.url], name, "edge", timeout=PATIENCE_S)
            stack.push_async_callback(bus.close)
            await Counters(JetStream(bus, timeout=PATIENCE_S), Subjects()).ensure()
            made.append(Api(counters=Counters(JetStream(bus, timeout=timeout), Subjects()).add))
            made[-1].keys.records = made[0].keys.records
        yield made


@pytest.mark.parametrize("owner", ["key", "tenant"])
async def test_five_hundred_requests_at_a_limit_of_a_hundred(own_nats_server: NatsServer, owner: str) -> None:
    """faults.md, gateway: 500 parallel requests over 3 gateways. The tenant's name has what NATS gives a meaning to."""
    limits = {"limits" if owner == "key" else "tenant_limits": Limits(requests_per_minute=LIMIT)}
    # what a counter adds and nobody waits for any more is lost until the next minute: here everybody waits
    async with three(own_nats_server, PATIENCE_S) as edges, AsyncExitStack() as stack:
        keys = [edges[0].keys.make(tenant="acme.eu > *", **limits) for _ in range(1 if owner == "key" else 5)]
        clients = [await stack.enter_async_context(api.client()) for api in edges]

        async def one(number: int) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[number % len(keys)]}"}
            return await clients[number % len(clients)].post(PATH, json=CHAT, headers=headers)

        answers: list[httpx.Response] = []
        while len(answers) < ASKED or Counter(answer.status_code for answer in answers)[503]:
            # a counter that does not answer in 50 ms, on a machine that others share, is a 503, after which clients come again
            answers = [answer for answer in answers if answer.status_code != 503]
            answers += await asyncio.gather(*(one(number) for number in range(ASKED - len(answers))))
    statuses = Counter(answer.status_code for answer in answers)
    assert LIMIT - len(edges) * 2 * (LIMIT // SLICES) <= statuses[200] <= LIMIT
    assert statuses[200] + statuses[429] == ASKED
    assert sum(len(api.jobs.handles) for api in edges) == statuses[200]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_the_server_that_counts_is_away(own_nats_server: NatsServer) -> None:
    """faults.md, gateway: quota store down (the counters): paid spend what their edges hold, then 503, free no more than that; an
    alarm; afterwards the same minute goes on, and nothing is admitted twice."""
    admitted, held = Counter[Tier](), len(NAMES) * 2 * (LIMIT // SLICES)
    async with three(own_nats_server, 1.0) as edges, AsyncExitStack() as stack:
        keys = {tier: edges[0].keys.make(tier=tier, limits=Limits(requests_per_minute=LIMIT)) for tier in (Tier.PAID, Tier.FREE)}
        clients = [await stack.enter_async_context(api.client()) for api in edges]

        async def spend(tier: Tier, until: int) -> None:
            """At each edge, until it answers so."""
            for client in clients:
                async with asyncio.timeout(PATIENCE_S):
                    headers = {"authorization": f"Bearer {keys[tier]}"}
                    while (answer := await client.post(PATH, json=CHAT, headers=headers)).status_code != until:
                        assert answer.status_code in (200, 503)
                        admitted[tier] += answer.status_code == 200
                        await asyncio.sleep(0)
                    assert int(answer.headers["retry-after"]) >= 1

        for client in clients:
            for tier in keys:
                began = await client.post(PATH, json=CHAT, headers={"authorization": f"Bearer {keys[tier]}"})
                admitted[tier] += began.status_code == 200
        before = admitted.copy()
        own_nats_server.stop()
        for tier in keys:
            await spend(tier, 503)
            assert admitted[tier] - before[tier] <= held
        assert all(b'headrace_counter_failures_total{kind="requests"} ' in api.metrics.prometheus_text() for api in edges)
        own_nats_server.start()
        for tier in keys:
            await spend(tier, 429)
            assert admitted[tier] <= LIMIT
            assert admitted[tier] > before[tier] + held, "it went on"
    assert sum(len(api.jobs.handles) for api in edges) == sum(admitted.values())
