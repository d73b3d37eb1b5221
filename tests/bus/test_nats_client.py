"""The seams in nats-py: each test fails when a new version moves what `nats_client` relies on."""

from __future__ import annotations

import inspect

import pytest
from nats.aio import client as nats_client
from nats.protocol.parser import Parser

from schemas.errors import IllegalSubject, MessageTooLarge
from services.bus.nats_bus import NatsBus, connect
from services.bus.nats_client import Client
from tests.nats_fixture import NatsServer
from tests.waiting import PATIENCE_S, until

PROCESS = "s1-0000000000000"


async def _bus(server: NatsServer) -> NatsBus:
    return await connect(server.url, PROCESS, "test", ping_interval=60.0)  # no ping of its own among what is pending


def test_the_methods_we_override_still_exist_with_their_parameters() -> None:
    for name in ("_build_message", "_process_err", "_process_headers", "_attempt_reconnect", "_send_ping"):
        ours = list(inspect.signature(getattr(Client, name)).parameters)
        theirs = list(inspect.signature(getattr(nats_client.Client, name)).parameters)
        assert ours == theirs, name


def test_they_are_still_called_where_we_expect_them() -> None:
    client = nats_client.Client
    assert "self._build_message(" in inspect.getsource(client._process_msg)
    assert "await self._process_headers(headers)" in inspect.getsource(client._process_msg)
    assert "self.nc._process_err(" in inspect.getsource(Parser.parse)
    assert "self._attempt_reconnect()" in inspect.getsource(client._process_op_err)
    assert "self._send_ping(" in inspect.getsource(client._ping_interval)
    assert "self._pings_outstanding > " in inspect.getsource(client._ping_interval)
    assert "self._pongs.pop(0)" in inspect.getsource(client._process_pong)


async def test_publish_appends_to_what_nats_py_would_write(nats_server: NatsServer) -> None:
    bus = await _bus(nats_server)
    client = bus._client
    await bus.flush(PATIENCE_S)
    assert client._pending == []
    bus.publish("a.b", b"xy", reply="c")
    bus.publish("a.b", b"xy", headers={"K": "v"})
    assert client._pending == [b"PUB a.b c 2\r\nxy\r\n", b"HPUB a.b  18 20\r\nNATS/1.0\r\nK: v\r\n\r\nxy\r\n"]
    assert client._pending_data_size == sum(map(len, client._pending))
    await until(lambda: not client._pending)
    assert client._pending_data_size == 0
    await bus.close()


async def test_a_flush_is_a_barrier_behind_what_is_pending(nats_server: NatsServer) -> None:
    bus = await _bus(nats_server)
    bus.publish("a", b"")
    pong = bus._client._pongs
    assert pong == []
    await bus._client._send_ping()
    assert bus._client._pending[-1] == b"PING\r\n"
    await bus.flush(PATIENCE_S)
    await bus.close()


async def test_the_socket_can_be_aborted(nats_server: NatsServer) -> None:
    bus = await _bus(nats_server)
    writer = bus._client._transport._io_writer  # type: ignore[union-attr]
    bus._client.abort()
    assert writer.transport.is_closing()
    await bus.close()


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0\r\n", "a\x00"])
async def test_subjects_that_would_break_the_framing_are_refused(nats_server: NatsServer, subject: str) -> None:
    bus = await _bus(nats_server)
    with pytest.raises(IllegalSubject):
        bus.publish(subject, b"")
    with pytest.raises(ValueError):
        await bus.subscribe(subject, lambda msg: None)
    with pytest.raises(MessageTooLarge):
        bus.publish("a" * 5_000, b"")
    await bus.close()
