"""The registry as a person sees it: JSON while it is renewed, gone when it is not, markers never mistaken for values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import nats
import pytest

from schemas.errors import BusUnavailable
from services.bus.jetstream import JetStream
from services.bus.kv_registry import KvRegistry
from services.bus.nats_bus import connect
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S

D1 = "d1-0000000000000"


@pytest.fixture
async def registry(nats_server: NatsServer) -> AsyncIterator[KvRegistry]:
    bus = await connect(nats_server.url, D1, "decode")
    js = JetStream(bus, timeout=PATIENCE_S)
    registry = KvRegistry(js, "HR_WORKERS", ttl_s=60.0)
    await registry.ensure()
    yield registry
    await js.api("STREAM.DELETE.KV_HR_WORKERS")
    await bus.close()


@pytest.fixture
def brief(registry: KvRegistry) -> KvRegistry:
    """The same bucket; what it says holds for a second."""
    return KvRegistry(registry._js, "HR_WORKERS", ttl_s=1.0)


async def test_a_plain_client_reads_lists_and_watches(registry: KvRegistry, brief: KvRegistry, nats_server: NatsServer) -> None:
    client = await nats.connect(nats_server.url)
    bucket = await client.jetstream(timeout=PATIENCE_S).key_value("HR_WORKERS")
    watch = await bucket.watchall()
    assert await watch.updates(timeout=PATIENCE_S) is None  # nothing was there before
    await registry.put(D1, {"role": "decode", "model": "m"})
    entry = await watch.updates(timeout=PATIENCE_S)
    assert entry is not None
    assert (entry.key, json.loads(entry.value or b"")) == (D1, {"role": "decode", "model": "m"})
    assert json.loads((await bucket.get(D1)).value or b"") == {"role": "decode", "model": "m"}
    assert await bucket.keys() == [D1]
    await brief.put(D1, {})
    assert await watch.updates(timeout=PATIENCE_S) is not None
    gone = await watch.updates(timeout=PATIENCE_S)  # it was not renewed
    assert gone is not None
    assert (gone.key, gone.value or b"") == (D1, b"")
    await client.close()


async def test_what_expired_is_none_and_comes_back_when_put_again(registry: KvRegistry, brief: KvRegistry) -> None:
    await brief.put(D1, {"beat": 1})
    await _until_gone(registry)
    await registry.put(D1, {"beat": 2})
    assert await registry.get(D1) == b'{"beat":2}'


async def test_renewal_keeps_it(registry: KvRegistry, brief: KvRegistry) -> None:
    await brief.put(D1, {"beat": 1})
    await registry.put(D1, {"beat": 2})
    await asyncio.sleep(1.6)
    assert await registry.get(D1) == b'{"beat":2}'


async def test_a_clean_goodbye(registry: KvRegistry) -> None:
    await registry.put(D1, {"beat": 1})
    await registry.remove(D1)
    assert await registry.get(D1) is None
    assert await registry.get("never") is None


async def test_ensure_is_idempotent_and_put_makes_a_lost_bucket(registry: KvRegistry) -> None:
    await registry.ensure()
    await registry._js.api("STREAM.DELETE.KV_HR_WORKERS")
    await registry.put(D1, {"beat": 1})
    assert await registry.get(D1) == b'{"beat":1}'


async def test_jetstream_away_is_one_exception(own_nats_server: NatsServer) -> None:
    bus = await connect(own_nats_server.url, D1, "decode")
    registry = KvRegistry(JetStream(bus, timeout=0.1), "HR_WORKERS")
    own_nats_server.pause()
    for call in (registry.ensure(), registry.put(D1, {}), registry.get(D1), registry.remove(D1)):
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(call, PATIENCE_S)
    with pytest.raises(ValueError):
        await registry.get("a b")
    own_nats_server.resume()
    await bus.close()


async def _until_gone(registry: KvRegistry) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    while await registry.get(D1) is not None:
        assert loop.time() < deadline
        await asyncio.sleep(0.05)
