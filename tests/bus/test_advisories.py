"""What the server of infra/nats/ says of connections reaches a router, in one server and in a cluster."""

from __future__ import annotations

import asyncio
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
from tests.waiting import PATIENCE_S

ACCOUNT = "HEADRACE"
D1 = "d1-0000000000000"


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
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    def note(msg: Msg) -> None:
        process = advisories.process_of(msg.data)
        if process == D1:
            heard.put_nowait((msg.subject.rpartition(".")[2], process))

    for subject in (advisories.connected(ACCOUNT), advisories.disconnected(ACCOUNT)):
        await router.subscribe(subject, note)
    await router.flush(PATIENCE_S)
    for server in servers:  # also one that the router is not connected to
        worker = await connect(server, D1, "decode", credentials=Credentials("decode", passwords["decode"]))
        async with asyncio.timeout(PATIENCE_S):
            assert await heard.get() == ("CONNECT", D1)
            await worker.close()
            assert await heard.get() == ("DISCONNECT", D1)
    await router.close()


def test_whose_name_is_no_process_is_nobody() -> None:
    assert advisories.process_of(b'{"client":{"name":"nats cli"}}') == ""
    assert advisories.process_of(b'{"client":{}}') == ""
    with pytest.raises(UnreadableMessage):
        advisories.process_of(b"{}")
