"""What the server of infra/nats/ says of connections reaches a router, in one server and in a cluster."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.errors import UnreadableMessage
from services.bus import advisories
from services.bus.interface import Msg
from services.bus.nats_bus import Credentials, connect
from services.cli.up.credentials import load_or_create
from services.cli.up.nats import NatsPlan, write_config
from tests.nats_fixture import NatsCluster
from tests.waiting import PATIENCE_S, until

ACCOUNT = "HEADRACE"
KNOWN_S = 1.0
"""After so long a worker comes again: its server did not know yet that a router at another one listens."""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[NatsCluster, dict[str, str]]]:
    """Three servers with our accounts and permissions; the password of each user."""
    passwords = dict(load_or_create(tmp_path / "nats"))
    write_config(NatsPlan(tmp_path / "nats", 0, 0), passwords)
    cluster = NatsCluster(tmp_path, (tmp_path / "nats" / "permissions.conf").read_text())
    try:
        cluster.start()
        yield cluster, passwords
    finally:
        cluster.kill()


async def test_a_router_hears_who_comes_and_goes(guarded: tuple[NatsCluster, dict[str, str]]) -> None:
    cluster, passwords = guarded
    servers = [node.url for node in cluster.nodes.values()]
    router = await connect(servers[0], "r1-0000000000000", "router", credentials=Credentials("router", passwords["router"]))
    heard: list[tuple[str, str]] = []

    def note(msg: Msg) -> None:
        heard.append((advisories.process_of(msg.data), msg.subject.rpartition(".")[2]))

    for subject in (advisories.connected(ACCOUNT), advisories.disconnected(ACCOUNT)):
        await router.subscribe(subject, note)
    await router.flush(PATIENCE_S)
    credentials, numbers = Credentials("decode", passwords["decode"]), itertools.count(1)

    async def told_of(process: str, server: str) -> bool:
        """Whether it was heard that this worker came to `server`, and then that it went."""
        worker = await connect(server, process, "decode", credentials=credentials)
        try:
            await until(lambda: (process, "CONNECT") in heard, KNOWN_S)
        except AssertionError:
            return False
        finally:
            await worker.close()
        await until(lambda: (process, "DISCONNECT") in heard)
        return [what for who, what in heard if who == process] == ["CONNECT", "DISCONNECT"]

    for server in servers:  # also one that the router is not connected to
        async with asyncio.timeout(2 * PATIENCE_S):
            while not await told_of(f"d{next(numbers)}-0000000000000", server):
                pass
    await router.close()


def test_whose_name_is_no_process_is_nobody() -> None:
    assert advisories.process_of(b'{"client":{"name":"nats cli"}}') == ""
    assert advisories.process_of(b'{"client":{}}') == ""
    with pytest.raises(UnreadableMessage):
        advisories.process_of(b"{}")
