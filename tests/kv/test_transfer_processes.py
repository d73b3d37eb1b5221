"""The transfer between real processes: an owner that is killed, stopped, or woken after its leases ran out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import xxhash

from services.kv.transfer import checksums, local, mapped, nixl_reader, stream
from services.kv.transfer.auto import TransferKind, transfer_client
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import ConnectionLost, FetchTimeout, TransferLimits
from services.kv.transfer.mapped import MappedReader
from services.kv.transfer.nixl_agent import NixlAgent
from services.kv.transfer.nixl_reader import NixlReader
from tests.kv.owner import BLOCK_BYTES, COMPAT, Line, read_line
from tests.kv.rig import Pausing, needs_nixl, nixl_agents
from tests.waiting import PATIENCE_S, until

COUNT = 24
LEASE_S = 3.0
START_S = 60.0
PATIENT = TransferLimits(lease_s=60.0, release_s=PATIENCE_S)
"""Of a reader: an owner that its machine does not let run for some seconds is not silent, nor lost."""
kinds = pytest.mark.parametrize("kind", ["tcp", "shm", pytest.param("nixl", marks=needs_nixl)])
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux's")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checksums, local, mapped, nixl_reader, stream):
        monkeypatch.setattr(module, "SILENT_S", PATIENT.lease_s)


@asynccontextmanager
async def owner(kind: TransferKind = "shm", *, lease_s: float = 60.0) -> AsyncIterator[tuple[Process, Line]]:
    argv = [sys.executable, "-m", "tests.kv.owner", str(COUNT), kind, str(lease_s)]
    process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield process, read_line(await asyncio.wait_for(process.stdout.readline(), START_S))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def outcome(process: Process) -> bytes:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).strip()


def client_of(kind: TransferKind, limits: TransferLimits = PATIENT) -> SocketTransferClient:
    return transfer_client(kind, nixl_agents()[1] if kind == "nixl" else None, limits)


def room() -> list[memoryview]:
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(COUNT)]


@kinds
async def test_blocks_of_another_process_arrive_whole(kind: TransferKind) -> None:
    async with owner(kind) as (process, line):
        client, into = client_of(kind), room()
        fetched = await client.fetch(line.ticket, line.blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S)
        assert await fetched.release()
        assert xxhash.xxh3_64_intdigest(b"".join(into)) == line.digest
        assert await outcome(process) == b"released"
        client.close()


@kinds
async def test_an_owner_killed_before_the_release_confirms_nothing(kind: TransferKind) -> None:
    async with owner(kind) as (process, line):
        client = client_of(kind)
        fetched = await client.fetch(line.ticket, line.blocks, room(), kv_compat=COMPAT, timeout=PATIENCE_S)
        process.kill()
        await process.wait()
        assert not await fetched.release()
        client.close()


@kinds
async def test_an_owner_killed_before_the_fetch_is_a_lost_connection(kind: TransferKind) -> None:
    async with owner(kind) as (process, line):
        process.kill()
        await process.wait()
        with pytest.raises(ConnectionLost):
            await client_of(kind).fetch(line.ticket, line.blocks, room(), kv_compat=COMPAT, timeout=PATIENCE_S)


@kinds
async def test_a_frozen_owner_costs_the_fetch_its_time_and_no_more(kind: TransferKind) -> None:
    async with owner(kind) as (process, line):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(FetchTimeout):
            await client_of(kind).fetch(line.ticket, line.blocks, room(), kv_compat=COMPAT, timeout=0.3)


@kinds
async def test_an_owner_that_froze_past_the_lease_confirms_nothing_when_it_wakes(kind: TransferKind) -> None:
    async with owner(kind, lease_s=LEASE_S) as (process, line):
        client = client_of(kind, replace(PATIENT, release_s=0.2, renew_s=0.1))
        fetched = await client.fetch(line.ticket, line.blocks, room(), kv_compat=COMPAT, timeout=PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        assert not await fetched.release()
        await asyncio.to_thread(_past_the_lease)
        process.send_signal(signal.SIGCONT)
        assert await outcome(process) in (b"expired", b"lost")
        client.close()


def _past_the_lease() -> None:
    """The lease of a stopped process runs on real time."""
    time.sleep(LEASE_S)


async def test_memory_whose_owner_is_killed_stays_readable_until_the_copy_ends_and_is_let_go() -> None:
    async with owner() as (process, line):
        inner = MappedReader()
        memory, reader = await inner.memory(line.ticket), Pausing(inner)
        client, into = SocketTransferClient([reader], PATIENT), room()
        fetch = asyncio.create_task(client.fetch(line.ticket, line.blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S))
        await asyncio.wait_for(reader.granted.wait(), PATIENCE_S)
        process.kill()
        await process.wait()
        await until(lambda: not inner.attached)
        assert memory[0] == memory[0], "no SIGBUS: the pages live as long as a mapping"
        reader.go.set()
        with pytest.raises(ConnectionLost):
            await fetch


@needs_nixl
async def test_an_owner_that_freezes_during_a_nixl_transfer_costs_one_arena_and_no_byte_of_the_pool() -> None:
    async with owner("nixl") as (process, line):
        agent, into = NixlAgent(), room()
        inner = NixlReader(agent)
        (await inner.open(line.ticket)).close()  # NIXL is loaded now, not in the fetch's time
        reader = Pausing(inner)
        client = SocketTransferClient([reader], PATIENT)
        fetch = asyncio.create_task(client.fetch(line.ticket, line.blocks, into, kv_compat=COMPAT, timeout=3))
        await asyncio.wait_for(reader.granted.wait(), PATIENCE_S)
        process.send_signal(signal.SIGSTOP)
        reader.go.set()
        with pytest.raises(FetchTimeout):
            await fetch
        assert agent._running, "the first transfer needs the owner's help, so it waits"
        process.send_signal(signal.SIGCONT)
        with contextlib.suppress(AssertionError):  # UCX may also never end it on a busy machine; its memory then stays apart
            await until(lambda: not agent._running and agent._idle)
        assert not any(any(view) for view in into), "what came late did not come into the pool"
        reader.close()
        agent.close()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="becoming another user needs root")
async def test_another_user_of_the_host_is_turned_away() -> None:
    async with owner() as (_, line):
        script = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
            "s.connect('\\0' + sys.argv[1]); print(s.recv(1))"
        )
        stranger = await asyncio.create_subprocess_exec(sys.executable, "-c", script, line.ticket.local, stdout=PIPE)
        said, _ = await asyncio.wait_for(stranger.communicate(), START_S)
        assert said.strip() == b"b''", "closed, with nothing said"
        client = client_of("shm")
        fetched = await client.fetch(line.ticket, line.blocks, room(), kv_compat=COMPAT, timeout=PATIENCE_S)
        assert await fetched.release()
        client.close()
