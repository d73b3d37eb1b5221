"""What only shared memory can suffer: bytes that change under the copy, descriptors for strangers; the choice of a carrier."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import msgspec
import pytest

from schemas.codec import encode
from schemas.handoff import Ticket
from schemas.transfer import Attach, Attached, Carrier, RefusalReason
from services.kv import memory
from services.kv.holders import HandoffHolder, RunHolder
from services.kv.transfer import local
from services.kv.transfer.auto import transfer_client
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import ConnectionLost, CorruptBlock, FetchDenied, Outcome
from services.kv.transfer.mapped import MappedReader
from services.kv.transfer.wire import receive_frame, send_frame
from tests.kv.rig import COMPAT, Pausing, Rig, rig
from tests.waiting import PATIENCE_S, until

H1 = HandoffHolder(1)


async def fetch_and_release(made: Rig, client: SocketTransferClient, run: int, blocks: int = 3) -> None:
    ticket, offered = made.offer(run, blocks)
    expected, into = made.contents(offered), made.room(run, blocks)
    assert await (await client.fetch(ticket, offered, into, kv_compat=COMPAT, timeout=PATIENCE_S)).release()
    assert [bytes(view) for view in into] == expected


async def test_the_memory_is_passed_once_however_many_fetches_begin_together() -> None:
    async with rig("shm") as made:
        reader = MappedReader()
        client = SocketTransferClient([reader])
        await fetch_and_release(made, client, 1)
        await asyncio.gather(*(fetch_and_release(made, client, run) for run in (2, 3, 4)))
        assert made.server.counts["attached"] == 1
        assert reader.attached == 1
        client.close()
        assert reader.attached == 0
        await until(lambda: not made.server._connections)  # type: ignore[attr-defined]


async def test_two_first_fetches_at_once_keep_one_mapping() -> None:
    async with rig("shm") as made:
        reader = MappedReader()
        client = SocketTransferClient([reader])
        await asyncio.gather(*(fetch_and_release(made, client, run) for run in (1, 2, 3)))
        assert reader.attached == 1
        await until(lambda: len(made.server._connections) == 1)  # type: ignore[attr-defined]
        client.close()


async def test_the_mapping_ends_with_its_owner() -> None:
    async with rig("shm") as made:
        reader = MappedReader()
        await fetch_and_release(made, SocketTransferClient([reader]), 1)
        await made.server.close()
        await until(lambda: reader.attached == 0)


async def test_blocks_given_out_anew_under_the_copy_are_discarded() -> None:
    async with rig("shm") as made:
        reader = Pausing(MappedReader())
        ticket, blocks = made.offer(1, 4)
        fetch = asyncio.create_task(
            SocketTransferClient([reader]).fetch(ticket, blocks, made.room(1, 4), kv_compat=COMPAT, timeout=PATIENCE_S)
        )
        await asyncio.wait_for(reader.granted.wait(), PATIENCE_S)
        await until(lambda: not made.server._sending, what="the checksums are out")  # type: ignore[attr-defined]
        made.clock.advance(2.1)
        await until(lambda: made.ended == [(H1, Outcome.EXPIRED)])
        for block in made.prefill.allocate(RunHolder(2), made.prefill.total):
            made.prefill.view(block)[:] = b"\xee" * made.prefill.block_bytes
        reader.go.set()
        with pytest.raises(CorruptBlock):
            await fetch
        reader.close()


async def test_a_cancelled_fetch_writes_nothing_more() -> None:
    async with rig("shm") as made:
        reader = Pausing(MappedReader())
        ticket, blocks = made.offer(1, 4)
        into = made.room(1, 4)
        fetch = asyncio.create_task(
            SocketTransferClient([reader]).fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S)
        )
        await asyncio.wait_for(reader.granted.wait(), PATIENCE_S)
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
        reader.go.set()
        await until(lambda: made.ended == [(H1, Outcome.LOST)])
        assert not any(any(view) for view in into)
        made.check_baseline()
        reader.close()


class ForeignReader(MappedReader):
    """Takes the blocks from another memory than the owner's: too small, or of other content."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._other = memoryview(bytes(size))

    async def memory(self, ticket: Ticket) -> memoryview:
        return self._other


@pytest.mark.parametrize("size", [32 * 4096, 4096, 0])
async def test_a_block_outside_or_other_than_offered_is_not_taken(size: int) -> None:
    async with rig("shm") as made:
        ticket, blocks = made.offer(1, 4)
        with pytest.raises(CorruptBlock):
            await SocketTransferClient([ForeignReader(size)]).fetch(
                ticket, blocks, made.room(1, 4), kv_compat=COMPAT, timeout=PATIENCE_S
            )


# the descriptor


async def attach(sock: socket.socket, token: bytes, carrier: Carrier = Carrier.MAPPED) -> Attached:
    async with asyncio.timeout(PATIENCE_S):
        await send_frame(sock, Attach(token=token, carrier=carrier))
        return await receive_frame(sock, Attached)


@pytest.mark.parametrize("token", [b"", bytes(24), b"\xff" * 100])
async def test_without_a_ticket_there_is_no_descriptor(token: bytes) -> None:
    async with rig("shm") as made:
        ticket, _ = made.offer(1, 1)
        with await local.connect(ticket.local) as sock:
            assert (await attach(sock, token)).refused is RefusalReason.UNKNOWN
            assert sock.recv(1) == b"", "closed, with nothing behind it"


async def test_a_ticket_lets_in_and_stays_good() -> None:
    async with rig("shm") as made:
        ticket, blocks = made.offer(1, 2)
        with await local.connect(ticket.local) as sock:
            attached = await attach(sock, ticket.token)
            fd = await asyncio.wait_for(local.receive_descriptor(sock), PATIENCE_S)
            assert bytes(memory.map_shared(fd, attached.size)) == bytes(made.prefill.view(0).obj)
        assert await (await made.client.fetch(ticket, blocks, made.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)).release()


async def test_no_descriptor_is_promised_over_tcp_nor_an_unknown_carrier_anywhere() -> None:
    async with rig("shm") as made:
        ticket, _ = made.offer(1, 1)
        host, port = ticket.address.split(":")
        with socket.create_connection((host, int(port))) as tcp, await local.connect(ticket.local) as unix:
            tcp.setblocking(False)
            assert (await attach(tcp, ticket.token)).refused is RefusalReason.CARRIER
            assert (await attach(unix, ticket.token, Carrier.NIXL)).refused is RefusalReason.CARRIER


async def test_an_attached_reader_that_talks_is_garbage() -> None:
    async with rig("shm") as made:
        ticket, _ = made.offer(1, 1)
        with await local.connect(ticket.local) as sock:
            await attach(sock, ticket.token)
            sock.send(b"?")
            await until(lambda: made.server.counts.get("garbage") == 1)


class Impostor:
    """Listens like an owner; grants, and passes `fd` or nothing."""

    def __init__(self, fd: int | None, size: int) -> None:
        self._listener, self.name = local.listen(8)
        self._fd, self._size = fd, size
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        with sock:
            await receive_frame(sock, Attach)
            await send_frame(sock, Attached(size=self._size))
            if self._fd is None:
                sock.send(b"\0")
            else:
                local.send_descriptor(sock, self._fd)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._listener.close()


@pytest.mark.parametrize("passed", ["nothing", "a file", "a smaller memory"])
async def test_what_is_no_sealed_memory_is_not_mapped(passed: str) -> None:
    own = memory.allocate(4096)
    file = os.open(__file__, os.O_RDONLY)
    impostor = Impostor({"nothing": None, "a file": file, "a smaller memory": own.fd}[passed], 8192)
    ticket = Ticket(address="127.0.0.1:1", token=b"", expires_s=1.0, local=impostor.name)
    with pytest.raises(ConnectionLost):
        await transfer_client("shm").fetch(ticket, [], [], kv_compat=COMPAT, timeout=PATIENCE_S)
    await impostor.close()
    os.close(file)


@pytest.mark.parametrize("name", ["", "systemd", "/run/x", "headrace-kv-nobody"])
async def test_only_our_own_sockets_are_called(name: str) -> None:
    with pytest.raises(OSError):
        await local.connect(name)


# the choice


async def test_on_one_host_the_memory_is_mapped() -> None:
    async with rig("auto") as made:
        client = transfer_client("auto")
        await fetch_and_release(made, client, 1)
        assert client.counts == {"mapped": 1}
        client.close()


@pytest.mark.parametrize("name", ["", "headrace-kv-elsewhere"])
async def test_an_owner_on_another_host_streams(name: str) -> None:
    async with rig("auto") as made:
        ticket, blocks = made.offer(1, 2)
        client = transfer_client("auto")
        elsewhere = msgspec.structs.replace(ticket, local=name)
        assert await (await client.fetch(elsewhere, blocks, made.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)).release()
        assert client.counts == {"stream": 1}


async def test_shared_memory_alone_does_not_fall_back() -> None:
    async with rig("shm") as made:
        ticket, blocks = made.offer(1, 1)
        elsewhere = msgspec.structs.replace(ticket, local="")
        with pytest.raises(ConnectionLost):
            await made.client.fetch(elsewhere, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)


async def test_a_refusal_is_no_reason_to_try_another_way() -> None:
    async with rig("auto") as made:
        ticket, blocks = made.offer(1, 1)
        with pytest.raises(FetchDenied):
            await made.client.fetch(
                msgspec.structs.replace(ticket, token=bytes(24)), blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S
            )
        assert made.server.counts["unknown_ticket"] == 1


async def test_private_memory_is_not_shared() -> None:
    async with rig("tcp") as made:
        made.prefill.fd = None
        assert not await made.server.share()  # type: ignore[attr-defined]
        ticket, _ = made.offer(1, 1)
        assert ticket.local == ""


def test_an_older_reader_understands_a_ticket_with_more_in_it() -> None:
    class OldTicket(msgspec.Struct):
        address: str
        token: bytes
        expires_s: float

    new = Ticket(address="h:1", token=b"t", expires_s=1.0, local="headrace-kv-x", nixl=True)
    assert msgspec.msgpack.decode(encode(new), type=OldTicket).address == "h:1"
    old = msgspec.msgpack.encode(OldTicket("h:1", b"t", 1.0))
    assert msgspec.msgpack.decode(old, type=Ticket) == Ticket(address="h:1", token=b"t", expires_s=1.0)
