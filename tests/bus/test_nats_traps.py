"""The ten traps of nats-py, each against a real server. Numbers are those of the reference page."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from schemas.errors import BusUnavailable, Disconnected, RequestTimeout
from services.bus import nats_client
from services.bus.interface import Msg
from services.bus.nats_bus import Credentials, NatsBus, connect
from services.bus.nats_client import MAX_UNSENT
from services.telemetry.metrics import Metrics
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S, until

ONE, TWO = "one-0000000000000", "two-0000000000000"


@pytest.fixture
async def server(own_nats_server: NatsServer) -> NatsServer:
    return own_nats_server


@pytest.fixture
async def bus(server: NatsServer) -> AsyncIterator[NatsBus]:
    bus = await connect(server.url, ONE, "test")
    yield bus
    await bus.close()


@pytest.fixture
async def peer(server: NatsServer) -> AsyncIterator[NatsBus]:
    peer = await connect(server.url, TWO, "test")
    yield peer
    await peer.close()


async def _works(bus: NatsBus) -> None:
    """`bus` answers itself, through the server."""
    await bus.subscribe("works", lambda msg: bus.publish(msg.reply, b"yes"))
    assert (await bus.request("works", b"", timeout=PATIENCE_S)).data == b"yes"


async def test_1_an_error_from_the_server_is_a_reconnect_not_the_end(server: NatsServer, peer: NatsBus) -> None:
    metrics = Metrics.collecting(ONE)
    bus = await connect(server.url, ONE, "test", metrics=metrics)
    got: list[bytes] = []
    await bus.subscribe("still.here", lambda msg: got.append(msg.data))
    await bus.flush(PATIENCE_S)
    bus._client._max_payload = 2**31  # as if our own check had missed it
    bus.publish("x", bytes(2_000_000))
    await until(lambda: bus.connected and bus.steady_for() < float("inf"), what="reconnected")
    assert 'headrace_bus_errors_total{kind="payload"} 1.0' in metrics.prometheus_text().decode()
    assert "headrace_bus_reconnects_total 1.0" in metrics.prometheus_text().decode()
    assert bus.connected
    assert bus.max_payload < 2_000_000
    await bus.flush(PATIENCE_S)  # the server knows again what it listens to
    peer.publish("still.here", b"heard")
    await until(lambda: got)
    await _works(bus)
    await bus.close()


async def test_2_nothing_published_while_down_is_ever_delivered(server: NatsServer, bus: NatsBus) -> None:
    server.kill()
    await until(lambda: not bus.connected)
    with pytest.raises(Disconnected):
        bus.publish("job", b"stale")
    with pytest.raises(Disconnected):
        await bus.request("job", b"stale", timeout=PATIENCE_S)
    server.start()
    got: list[Msg] = []
    late = await connect(server.url, TWO, "test")
    await late.subscribe("job", got.append)
    await late.flush(PATIENCE_S)
    await until(lambda: bus.connected)
    bus.publish("job", b"fresh")
    await until(lambda: got)
    assert [msg.data for msg in got] == [b"fresh"]
    await late.close()


async def test_2_what_a_hanging_server_did_not_read_is_not_sent_later(server: NatsServer, bus: NatsBus) -> None:
    async def flood() -> None:
        for _ in range(200):  # more than the sockets and our own limit hold
            bus.publish("job", bytes(500_000))
            await asyncio.sleep(0)

    server.pause()
    with pytest.raises(Disconnected):
        await flood()
    assert bus.connected  # nobody knows yet that it hangs
    assert bus._client._pending_data_size < MAX_UNSENT + 1_000_000
    server.kill()
    await until(lambda: not bus.connected)
    assert bus._client._pending_data_size == 0
    server.start()
    late = await connect(server.url, TWO, "test")
    got: list[Msg] = []
    await late.subscribe("job", got.append)
    await late.flush(PATIENCE_S)
    await until(lambda: bus.connected)
    await _works(bus)
    await late.flush(PATIENCE_S)
    assert got == []
    await late.close()


async def test_3_handlers_dispatch_so_slow_requests_run_together(bus: NatsBus, peer: NatsBus) -> None:
    started, go, tasks = [], asyncio.Event(), set()

    async def answer(msg: Msg) -> None:
        started.append(msg)
        await go.wait()
        peer.publish(msg.reply, b"done")

    def handler(msg: Msg) -> None:
        task = asyncio.ensure_future(answer(msg))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    await peer.subscribe("slow", handler)
    await peer.flush(PATIENCE_S)
    asking = asyncio.gather(*(bus.request("slow", b"", timeout=PATIENCE_S) for _ in range(3)))
    await until(lambda: len(started) == 3, what="all three at once")
    go.set()
    assert [msg.data for msg in await asking] == [b"done"] * 3


async def test_5_drain_ends_at_its_deadline_and_while_disconnected(server: NatsServer, bus: NatsBus) -> None:
    loop = asyncio.get_running_loop()
    server.pause()
    began = loop.time()
    await bus.drain(0.2)
    assert loop.time() - began < PATIENCE_S  # nats-py's own default is 30 s
    assert not bus.connected
    server.resume()
    other = await connect(server.url, TWO, "test")
    server.kill()
    await until(lambda: not other.connected)
    await other.drain(PATIENCE_S)
    with pytest.raises(Disconnected):
        other.publish("x", b"")


async def test_5_closing_while_it_reconnects_leaves_no_connection_behind(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_client, "RECONNECT_EVERY", 0.004)
    random = Random(5)
    mine = asyncio.current_task()
    for _ in range(80):
        bus = await connect(server.url, ONE, "test")
        await bus._client._process_op_err(OSError("cut"))
        await asyncio.sleep(random.random() * 0.012)  # somewhere in the middle
        await bus.close()
        await until(lambda: asyncio.all_tasks() == {mine}, what="nats-py's tasks ended")
        assert not bus._client.is_connected


async def test_7_a_slow_handler_loses_nothing(bus: NatsBus, peer: NatsBus) -> None:
    got: list[int] = []
    loop = asyncio.get_running_loop()

    def slow(msg: Msg) -> None:
        got.append(int(msg.data))
        if len(got) % 5_000 == 1:
            until_then = loop.time() + 0.1
            while loop.time() < until_then:
                pass

    await bus.subscribe("flood", slow)
    await bus.flush(PATIENCE_S)
    for number in range(20_000):
        peer.publish("flood", str(number).encode())
    await until(lambda: len(got) == 20_000, timeout=20.0)
    assert got == list(range(20_000))
    assert bus.steady_for() == float("inf")


async def test_8_a_flush_that_timed_out_does_not_deafen_us(server: NatsServer, bus: NatsBus) -> None:
    server.pause()
    with pytest.raises(RequestTimeout):
        await bus.flush(0.05)
    server.resume()
    await _works(bus)
    await bus.flush(PATIENCE_S)
    assert bus.steady_for() == float("inf")


async def test_8_a_dead_connection_is_noticed_by_ping(server: NatsServer) -> None:
    bus = await connect(server.url, ONE, "test", ping_interval=0.05)
    server.pause()
    await until(lambda: not bus.connected)
    assert bus.down_for() >= 0.0
    bus._client.options["ping_interval"] = 60.0  # 50 ms are no time for a server on a busy machine
    server.resume()
    await until(lambda: bus.connected)
    await _works(bus)
    await bus.close()


async def test_9_connect_is_bounded_and_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = asyncio.get_running_loop().time()
        with pytest.raises(BusUnavailable) as failed:
            await connect(f"nats://user:secret@127.0.0.1:{port}", ONE, "test", timeout=0.5)
    assert asyncio.get_running_loop().time() - began < PATIENCE_S
    assert f"no NATS at 127.0.0.1:{port} within 0.5 s" in str(failed.value)
    assert "secret" not in str(failed.value)


async def test_9_refused_credentials_are_told_at_once(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, 'authorization { users: [ { user: "edge", password: "right" } ] }')
    server.start()
    try:
        began = asyncio.get_running_loop().time()
        with pytest.raises(BusUnavailable, match="refused the credentials of 'edge'"):
            await connect(server.url, ONE, "edge", credentials=Credentials("edge", "wrong"), timeout=30.0)
        assert asyncio.get_running_loop().time() - began < PATIENCE_S
        bus = await connect(server.url, ONE, "edge", credentials=Credentials("edge", "right"))
        await _works(bus)
        await bus.close()
    finally:
        server.kill()


async def test_9_it_reconnects_for_ever_and_hears_again(server: NatsServer, bus: NatsBus, peer: NatsBus) -> None:
    got: list[bytes] = []
    await bus.subscribe("r.*", lambda msg: got.append(msg.data), queue="g")
    gone = await bus.subscribe("gone", lambda msg: got.append(b"unsubscribed"))
    await bus.flush(PATIENCE_S)
    server.kill()
    await until(lambda: not bus.connected and not peer.connected)
    assert bus.steady_for() == 0.0
    await gone.unsubscribe()
    await until(lambda: bus.down_for() > 0.3, what="some attempts failed")
    server.start()
    await until(lambda: bus.connected and peer.connected)
    assert bus.down_for() == 0.0
    assert 0.0 <= bus.steady_for() < PATIENCE_S
    await bus.flush(PATIENCE_S)
    peer.publish("gone", b"")
    peer.publish("r.1", b"again")
    await until(lambda: got)
    assert got == [b"again"]
    await _works(bus)


async def test_10_a_delivered_jetstream_message_carries_the_ack_subject(bus: NatsBus) -> None:
    """Why the caller's inbox travels in a header or in the payload, and never as the NATS reply subject of a job."""
    await bus.request("$JS.API.STREAM.CREATE.T", json.dumps({"name": "T", "subjects": ["t.>"]}).encode(), timeout=PATIENCE_S)
    await bus.request("t.job", b"x", timeout=PATIENCE_S, headers={"Headrace-Reply": "mine"})
    config = {"stream_name": "T", "config": {"durable_name": "d", "ack_policy": "explicit"}}
    await bus.request("$JS.API.CONSUMER.DURABLE.CREATE.T.d", json.dumps(config).encode(), timeout=PATIENCE_S)
    got: list[Msg] = []
    inbox = bus.new_inbox() + ".pull"
    await bus.subscribe(inbox, got.append)
    bus.publish("$JS.API.CONSUMER.MSG.NEXT.T.d", b'{"batch":1,"no_wait":true}', reply=inbox)
    await until(lambda: got)
    assert got[0].reply.startswith("$JS.ACK.T.d.")
    assert got[0].headers["Headrace-Reply"] == "mine"


async def test_the_connection_bears_our_process_id(bus: NatsBus, tmp_path: Path) -> None:
    assert bus._client.options["name"] == ONE == bus.process


async def test_permission_violations_are_counted_and_do_not_end_the_connection(tmp_path: Path) -> None:
    server = NatsServer(
        tmp_path,
        'authorization { users: [ { user: "u", password: "p", permissions: { publish: ["works", "_INBOX.>"] } } ] }',
    )
    server.start()
    try:
        bus = await connect(server.url, ONE, "test", credentials=Credentials("u", "p"))
        bus.publish("forbidden", b"")
        await until(lambda: "permissions violation" in bus.last_error)
        await _works(bus)
        assert bus.steady_for() == float("inf")
        await bus.close()
    finally:
        server.kill()
