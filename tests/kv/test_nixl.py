"""NIXL: what becomes of transfers that nobody waits for, that fail or never end; and when it is used."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass, field

import msgspec
import pytest

from services.kv import memory
from services.kv.transfer import auto
from services.kv.transfer import nixl_agent as nixl
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import ConnectionLost
from services.kv.transfer.nixl_agent import NixlAgent, NixlError
from services.kv.transfer.nixl_reader import NixlReader
from services.settings.errors import SettingsError
from tests.kv.rig import COMPAT, needs_nixl, nixl_agents, rig
from tests.waiting import PATIENCE_S, until


@dataclass
class FakeNixl:
    """NIXL's agent for one process: a transfer copies when `state` becomes DONE and it is asked."""

    state: str = "PROC"
    post_error: Exception | None = None
    registered: list[int] = field(default_factory=list)
    released: int = 0
    asked: int = 0

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self.registered += [size for _, size, _, _ in regions]

    def get_xfer_descs(self, pieces: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return pieces

    def initialize_xfer(self, verb: str, here: object, there: object, agent: str) -> tuple[object, object]:
        return here, there

    def transfer(self, handle: object) -> str:
        if self.post_error is not None:
            raise self.post_error
        return self.state

    def check_xfer_state(self, handle: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]) -> str:
        self.asked += 1
        if self.state == "DONE":
            for (to, size, _), (source, _, _) in zip(*handle, strict=True):
                ctypes.memmove(to, source, size)
        return self.state

    def release_xfer_handle(self, handle: object) -> None:
        self.released += 1


def there(content: bytes) -> tuple[memoryview, list[tuple[int, int]]]:
    """Memory with this content, and its two halves as pieces, last first."""
    view = memory.allocate(len(content)).view
    view[:] = content
    half, address = len(content) // 2, ctypes.addressof(ctypes.c_char.from_buffer(view))
    return view, [(address + half, half), (address, half)]


async def test_pieces_arrive_one_after_the_other_and_an_arena_is_used_again() -> None:
    fake = FakeNixl()
    agent = NixlAgent(lambda: fake)
    source, pieces = there(b"worldhello")
    for _ in range(3):
        fake.state, fake.asked = "PROC", 0
        reading = asyncio.create_task(agent.read("owner", pieces))
        await until(lambda: fake.asked > 2)
        fake.state = "DONE"
        arena = await asyncio.wait_for(reading, PATIENCE_S)
        assert bytes(arena.view[:10]) == b"helloworld"
        agent.recycle(arena)
    assert len(fake.registered) == 1
    assert fake.released == 3
    agent.close()
    del source


async def test_a_transfer_that_nobody_waits_for_keeps_its_arena_until_it_ends() -> None:
    fake = FakeNixl()
    agent = NixlAgent(lambda: fake)
    _, pieces = there(bytes(8))
    reading = asyncio.create_task(agent.read("owner", pieces))
    await until(lambda: fake.asked > 0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not agent._idle
    assert fake.released == 0, "late bytes may still be on their way"
    fake.state = "DONE"
    await until(lambda: len(agent._idle) == 1)
    assert fake.released == 1
    agent.close()


@pytest.mark.parametrize("post_error", [None, RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")])
async def test_the_arena_of_a_failed_transfer_is_never_used_again(post_error: Exception | None) -> None:
    fake = FakeNixl("ERR", post_error)
    agent = NixlAgent(lambda: fake)
    _, pieces = there(bytes(8))
    for _ in range(2):
        with pytest.raises(NixlError):
            await agent.read("owner", pieces)
    assert not agent._idle
    assert len(fake.registered) == 2
    agent.close()


async def test_too_many_lost_arenas_are_a_reason_to_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_MOST_BYTES", 3 << 20)
    agent = NixlAgent(lambda: FakeNixl("ERR"))
    _, pieces = there(bytes(8))
    for lost in range(3):
        assert not agent.is_exhausted, lost
        with pytest.raises(NixlError):
            await agent.read("owner", pieces)
    assert agent.is_exhausted
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 1)
        client = SocketTransferClient([NixlReader(agent), *auto.transfer_client("tcp")._readers])
        offered = msgspec.structs.replace(ticket, nixl=True)
        assert await (await client.fetch(offered, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)).release()
        assert client.counts == {"stream": 1}
    agent.close()


async def test_a_library_that_does_not_load_is_an_error_of_ours() -> None:
    def broken() -> None:
        raise ImportError("libucs.so.0")

    agent = NixlAgent(broken)
    with pytest.raises(NixlError, match="libucs"):
        await agent.lend(memory.allocate(4096).view)
    agent.close()


# when it is used


async def test_loopback_is_not_worth_loading_it() -> None:
    loaded = []
    async with rig("tcp") as made:
        await auto.open_carriers(made.server, "auto", NixlAgent(lambda: loaded.append(1)))  # type: ignore[arg-type]
        ticket, _ = made.offer(1, 1)
        assert ticket.local
        assert not ticket.nixl
        assert not loaded


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("10.0.0.7:1", False), ("worker-3:1", False)],
)
def test_loopback_addresses(address: str, is_loopback: bool) -> None:
    assert auto._is_loopback(address) is is_loopback


def test_where_it_is_not_installed_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MODULE", "no_such_module")
    assert auto.nixl_agent("auto") is None
    with pytest.raises(SettingsError, match="the extra 'nixl'"):
        auto.nixl_agent("nixl")


@needs_nixl
async def test_between_hosts_it_comes_before_tcp() -> None:
    async with rig("nixl") as made:
        ticket, blocks = made.offer(1, 3)
        expected, into = made.contents(blocks), made.room(1, 3)
        client = auto.transfer_client("auto", nixl_agents()[1])
        assert await (await client.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S)).release()
        assert [bytes(view) for view in into] == expected
        assert client.counts == {"nixl": 1}
        client.close()


async def test_alone_it_does_not_fall_back() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 1)
        client = SocketTransferClient([NixlReader(NixlAgent(FakeNixl))])
        with pytest.raises(ConnectionLost):
            await client.fetch(ticket, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
