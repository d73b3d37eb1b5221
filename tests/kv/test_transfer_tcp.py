"""What only TCP can suffer: lost bytes, spoiled bytes, strangers on the port, peers that stop in the middle."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import msgspec
import pytest
import xxhash

from schemas.codec import encode
from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Fetch, FetchAnswer, Keep, Released
from services.clock import ManualClock
from services.kv.holders import HandoffHolder, RunHolder
from services.kv.pool import BlockPool
from services.kv.transfer.auto import transfer_client
from services.kv.transfer.interface import ConnectionLost, CorruptBlock, FetchTimeout, Outcome, TransferLimits
from services.kv.transfer.server import SocketTransferServer
from services.kv.transfer.wire import advertised, split_address
from tests.kv.rig import COMPAT, FAST, FROZEN, Proxy, Rig, rig
from tests.waiting import PATIENCE_S, until

H1 = HandoffHolder(1)
ENOUGH = 16 << 20  # bytes that no pair of socket buffers holds


def via(ticket: Ticket, address: str) -> Ticket:
    return msgspec.structs.replace(ticket, address=address)


def frame(message: msgspec.Struct) -> bytes:
    body = encode(message)
    return len(body).to_bytes(4, "little") + body


def grant_frame(made: Rig) -> bytes:
    return frame(FetchAnswer(block_bytes=made.prefill.block_bytes))


async def connect(made: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    await asyncio.get_running_loop().sock_connect(sock, split_address(made.server.address))
    return await asyncio.open_connection(sock=sock)


async def present(made: Rig, ticket: Ticket, blocks: list[BlockRef]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A peer that presents its ticket by hand, and then does what the test wants."""
    reader, writer = await connect(made)
    wanted = tuple((block.slot, block.generation) for block in blocks)
    writer.write(frame(Fetch(token=ticket.token, kv_compat=COMPAT, blocks=wanted)))
    await until(lambda: made.server.counts.get("granted", 0) == 1)
    return reader, writer


@pytest.mark.parametrize("budget", [0, 3, 20, 4096, 9000])
async def test_an_end_of_file_in_the_middle_is_lost_for_both(budget: int) -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 3)
        async with Proxy(made.server.address, budget=budget, close=True).running() as address:
            with pytest.raises(ConnectionLost):
                await made.client.fetch(via(ticket, address), blocks, made.room(1, 3), kv_compat=COMPAT, timeout=PATIENCE_S)
            await until(lambda: made.ended == [(H1, Outcome.LOST)])
        made.check_baseline()


async def test_a_bit_that_flips_on_the_wire_is_found() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 3)
        async with Proxy(made.server.address, flip=7000).running() as address:
            with pytest.raises(CorruptBlock):
                await made.client.fetch(via(ticket, address), blocks, made.room(1, 3), kv_compat=COMPAT, timeout=PATIENCE_S)
            await until(lambda: made.ended == [(H1, Outcome.LOST)])


async def test_a_fetch_that_stalls_ends_in_its_time() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 3)
        proxy = Proxy(made.server.address, budget=6000)
        async with proxy.running() as address:
            with pytest.raises(FetchTimeout):
                await made.client.fetch(via(ticket, address), blocks, made.room(1, 3), kv_compat=COMPAT, timeout=0.2)
            await asyncio.wait_for(proxy.client_left.wait(), PATIENCE_S)
            await until(lambda: made.ended == [(H1, Outcome.LOST)])


@pytest.mark.parametrize("budget", [0, 6000], ids=["at once", "in the middle"])
async def test_a_sender_that_says_nothing_for_a_lease_is_given_up(budget: int) -> None:
    """Long before the time of the whole fetch: a decode worker does not wait half a minute for a frozen prefill worker."""
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 3)
        proxy, client = Proxy(made.server.address, budget=budget), transfer_client("tcp", limits=FAST)
        async with proxy.running() as address:
            began = asyncio.get_running_loop().time()
            with pytest.raises(FetchTimeout):
                await client.fetch(via(ticket, address), blocks, made.room(1, 3), kv_compat=COMPAT, timeout=60)
            assert asyncio.get_running_loop().time() - began < 20


async def test_a_cancelled_fetch_frees_both_sides_and_writes_nothing_more() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 3)
        into = made.room(1, 3)
        proxy = Proxy(made.server.address, budget=6000)
        async with proxy.running() as address:
            fetch = asyncio.create_task(made.client.fetch(via(ticket, address), blocks, into, kv_compat=COMPAT, timeout=30))
            await until(lambda: proxy.forwarded == 6000 and any(into[1]))
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            assert not [task for task in asyncio.all_tasks() if "SocketFetched" in repr(task.get_coro())], "nobody renews"
            made.decode.release(RunHolder(1))
            [block, *_] = made.decode.allocate(RunHolder(2), made.decode.total)
            made.decode.view(block)[:] = bytes(made.decode.block_bytes)
            await asyncio.wait_for(proxy.client_left.wait(), PATIENCE_S)
            await until(lambda: made.ended == [(H1, Outcome.LOST)])
            assert not any(made.decode.view(block))
        made.check_baseline()


async def test_a_lost_answer_is_not_an_ok() -> None:
    async with rig("tcp") as made:
        impatient = transfer_client("tcp", limits=TransferLimits(release_s=0.1))
        ticket, blocks = made.offer(1, 1)
        before_answer = len(grant_frame(made)) + 8 + 4096
        async with Proxy(made.server.address, budget=before_answer).running() as address:
            fetched = await impatient.fetch(via(ticket, address), blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
            assert not await fetched.release()
            await until(lambda: made.ended, what="the end of the offer")
            assert made.ended == [(H1, Outcome.RELEASED)], "the server cannot know; the run is placed again"


async def test_a_peer_that_stops_reading_gets_no_foreign_bytes_when_it_wakes() -> None:
    async with rig("tcp", block_bytes=ENOUGH // 8) as made:
        ticket, blocks = made.offer(1, 16)
        honest = b"".join(xxhash.xxh3_64_digest(data)[::-1] + data for data in made.contents(blocks))
        reader, writer = await present(made, ticket, blocks)
        await until(lambda: bool(made.server._sending))  # type: ignore[attr-defined]
        made.clock.advance(2.1)
        await until(lambda: made.ended == [(H1, Outcome.EXPIRED)])
        for block in made.prefill.allocate(RunHolder(2), made.prefill.total):
            made.prefill.view(block)[:] = b"\xee" * made.prefill.block_bytes
        received = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                received = await reader.read(-1)
        after_grant = received[len(grant_frame(made)) :]
        assert len(after_grant) < len(honest), "the connection was cut"
        assert honest.startswith(after_grant)
        writer.close()


async def test_the_end_of_an_offer_cuts_a_connection_that_still_sends() -> None:
    async with rig("tcp", block_bytes=ENOUGH // 8) as made:
        ticket, blocks = made.offer(1, 16)
        _, writer = await present(made, ticket, blocks)
        assert made.server.revoke(H1)
        await until(lambda: not made.server._connections)  # type: ignore[attr-defined]
        made.check_baseline()
        writer.close()


async def test_a_release_before_the_copy_is_answered_after_it() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 4)
        reader, writer = await present(made, ticket, blocks)
        writer.write(frame(Keep(done=True)))
        async with asyncio.timeout(PATIENCE_S):
            await reader.readexactly(len(grant_frame(made)) + 4 * (8 + 4096))
            assert await reader.read(-1)
        assert made.ended == [(H1, Outcome.RELEASED)]
        writer.close()


async def test_a_lapsed_offer_stops_at_the_next_block_before_any_sweep() -> None:
    async with rig("tcp", block_bytes=ENOUGH // 8, limits=FROZEN) as made:
        ticket, blocks = made.offer(1, 16)
        reader, writer = await present(made, ticket, blocks)
        await until(lambda: bool(made.server._sending))  # type: ignore[attr-defined]
        made.clock.advance(2.1)
        made.prefill.expire(made.clock.now)
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                assert len(await reader.read(-1)) < 16 * made.prefill.block_bytes
        await until(lambda: made.ended == [(H1, Outcome.EXPIRED)])
        writer.close()


async def test_the_client_says_nothing_after_its_last_word() -> None:
    """A frame that arrives after the server closed is answered by a reset, which may swallow the answer before it."""
    spoken = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(FetchAnswer(block_bytes=1)))
        while frame(Keep(done=True)) not in spoken:
            spoken.extend(await reader.read(65536))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.1):  # ten renewals
                spoken.extend(await reader.read(65536))
        writer.write(frame(Released(ok=True)))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    ticket = Ticket(address="{}:{}".format(*server.sockets[0].getsockname()), token=b"", expires_s=1.0)
    fetched = await transfer_client("tcp", limits=FAST).fetch(ticket, [], [], kv_compat=COMPAT, timeout=PATIENCE_S)
    await until(lambda: frame(Keep()) in spoken)
    assert await fetched.release()
    assert spoken.endswith(frame(Keep(done=True)))
    server.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1",
        b"\x00\x00\x00\x00",
        frame(Keep()),
        b"\x05\x00\x00\x00" + b"\x81\xa6sche",
    ],
)
async def test_garbage_closes_its_connection_is_counted_and_harms_nobody(garbage: bytes) -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 2)
        reader, writer = await connect(made)
        writer.write(garbage)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                assert await reader.read(-1) == b""
        assert made.server.counts["garbage"] == 1
        fetched = await made.client.fetch(ticket, blocks, made.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
        assert await fetched.release()
        writer.close()


async def test_garbage_after_the_ticket_ends_the_offer() -> None:
    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 2)
        _, writer = await present(made, ticket, blocks)
        writer.write(b"\xff" * 64)
        await until(lambda: made.ended == [(H1, Outcome.LOST)])
        assert made.server.counts["garbage"] == 1
        writer.close()


async def test_a_client_discards_an_answer_it_cannot_read() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with rig("tcp") as made:
        ticket, blocks = made.offer(1, 1)
        stranger = await asyncio.start_server(babble, "127.0.0.1", 0)
        address = "{}:{}".format(*stranger.sockets[0].getsockname())
        with pytest.raises(ConnectionLost):
            await made.client.fetch(via(ticket, address), blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
        stranger.close()


async def test_a_silent_connection_is_closed() -> None:
    async with rig("tcp", limits=TransferLimits(renew_s=0.01, first_frame_s=0.05)) as made:
        reader, writer = await connect(made)
        assert await asyncio.wait_for(reader.read(-1), PATIENCE_S) == b""
        assert made.server.counts["broken"] == 1
        writer.close()


async def test_connections_are_bounded() -> None:
    async with rig("tcp", limits=TransferLimits(renew_s=0.01, connections=2)) as made:
        ticket, blocks = made.offer(1, 1)
        idle = [await connect(made) for _ in range(2)]
        await until(lambda: len(made.server._connections) == 2)  # type: ignore[attr-defined]
        with pytest.raises(ConnectionLost):
            await made.client.fetch(ticket, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
        assert made.server.counts["turned_away"] == 1
        for _, writer in idle:
            writer.close()
        await until(lambda: not made.server._connections)  # type: ignore[attr-defined]
        made.decode.release(RunHolder(1))
        fetched = await made.client.fetch(ticket, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
        assert await fetched.release()


async def test_large_blocks_arrive_whole() -> None:
    async with rig("tcp", block_bytes=ENOUGH // 8) as made:
        ticket, blocks = made.offer(1, 16)
        into = made.room(1, 16)
        async with await made.client.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=60) as fetched:
            assert await fetched.release()
        assert [bytes(view) for view in into] == made.contents(blocks)


async def test_tickets_name_the_advertised_address_not_the_bound_one() -> None:
    pool = BlockPool(1, block_bytes=8, memory=memoryview(bytearray(8)))
    server = SocketTransferServer(pool, clock=ManualClock())
    await server.start("0.0.0.0", 0, advertise="kv.example:7000")
    pool.allocate(H1, 1)
    assert server.offer(H1, kv_compat=COMPAT, on_done=lambda holder, outcome: None).address == "kv.example:7000"
    await server.close()


async def test_ipv6() -> None:
    async with rig("tcp") as made:
        await made.server.close()
        server = SocketTransferServer(made.prefill, clock=made.clock, limits=FAST)
        try:
            await server.start("::1", 0)
        except OSError:
            pytest.skip("no IPv6 here")
        made.server = server
        ticket, blocks = made.offer(1, 1)
        assert ticket.address.startswith("[::1]:")
        fetched = await made.client.fetch(ticket, blocks, made.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
        assert await fetched.release()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1:9"),
        ("h", "h:9"),
        ("h:7", "h:7"),
        ("::1", "[::1]:9"),
        ("[::1]", "[::1]:9"),
        ("[::1]:7", "[::1]:7"),
    ],
)
def test_advertised_addresses(host: str, address: str) -> None:
    assert advertised(host, 9) == address
    parsed_host, parsed_port = split_address(address)
    assert (parsed_host, parsed_port) == (host.split("]")[0].strip("[") if "::" in host else host.split(":")[0], int(address[-1]))


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(address)
