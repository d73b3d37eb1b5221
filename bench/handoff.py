"""What handing over the KV blocks of one prompt costs between two processes of this host. Run it alone:

    .venv/bin/python -m bench.handoff [--rounds 51] [--tokens 512] [--block-bytes 368640] [--carriers tcp shm nixl]

Every round, for each carrier in turn, the owner fills fresh blocks; half of them are fetched, and the other half copied by one
thread's memcpy between the same two mappings, now before and now after the fetch. `copy` is the time from the grant to the last
verified block, `ratio` memcpy's time over it (median of the rounds), `whole` the time from the ticket's arrival to the release's
answer. `lag` is how late a timer of 1 ms fired meanwhile, in the reader and in the owner: a round's worst, median and maximum.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import uvloop

from schemas.handoff import BlockRef, Ticket
from schemas.transfer import Carrier
from services.clock import SystemClock
from services.kv import memory
from services.kv.holders import HandoffHolder, Holder, RunHolder
from services.kv.pool import BlockPool
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.interface import Outcome
from services.kv.transfer.mapped import MappedReader
from services.kv.transfer.nixl_agent import NixlAgent, installed
from services.kv.transfer.nixl_reader import NixlReader
from services.kv.transfer.reader import Reader
from services.kv.transfer.server import SocketTransferServer
from services.kv.transfer.stream import StreamReader

BLOCK_TOKENS = 16
COMPAT = "bench"
READERS: dict[str, Callable[[], Reader]] = {"tcp": StreamReader, "shm": MappedReader, "nixl": lambda: NixlReader(NixlAgent())}


@dataclass
class Figures:
    """One carrier's rounds: seconds."""

    whole: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    reader_lag: list[float] = field(default_factory=list)
    owner_lag: list[float] = field(default_factory=list)


class Timed:
    """A `Reader` that says how long `receive` took."""

    def __init__(self, reader: Reader) -> None:
        self.carrier: Carrier = reader.carrier
        self.open, self.close = reader.open, reader.close
        self._reader = reader
        self.took = 0.0

    async def receive(
        self, sock: socket.socket, ticket: Ticket, block_bytes: int, blocks: Sequence[BlockRef], into: Sequence[memoryview]
    ) -> None:
        started = time.perf_counter()
        await self._reader.receive(sock, ticket, block_bytes, blocks, into)
        self.took = time.perf_counter() - started


class Lag:
    """How late the loop was, at worst, since `start`."""

    PERIOD_S = 0.001

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst = 0.0
        self.start()

    def start(self) -> None:
        self._worst, self._due = 0.0, time.perf_counter() + self.PERIOD_S
        self._timer = self._loop.call_at(self._loop.time() + self.PERIOD_S, self._tick)

    def stop(self) -> float:
        self._timer.cancel()
        return max(self._worst, time.perf_counter() - self._due)

    def _tick(self) -> None:
        worst = max(self._worst, time.perf_counter() - self._due)
        self.start()
        self._worst = worst


def new_pool(blocks: int, block_bytes: int) -> BlockPool:
    own = memory.allocate(blocks * block_bytes)
    own.view[:] = bytes(blocks * block_bytes)  # every page is there before anything is timed
    return BlockPool(blocks, block_bytes=block_bytes, memory=own.view, fd=own.fd)


# the owner


def own(pipe: Connection, blocks: int, block_bytes: int) -> None:
    uvloop.run(_own(pipe, blocks, block_bytes))


async def _own(pipe: Connection, blocks: int, block_bytes: int) -> None:
    """Each message is a number of blocks: offer so many; say the worst lag when they were released. 0: end."""
    pool = new_pool(8 * blocks, block_bytes)
    content = random.randbytes(block_bytes)
    ended: asyncio.Queue[Outcome] = asyncio.Queue()

    def on_done(holder: Holder, outcome: Outcome) -> None:
        ended.put_nowait(outcome)

    server = SocketTransferServer(pool, clock=SystemClock())
    await server.start("127.0.0.1", 0)
    assert await server.share()
    if installed():
        await server.lend(NixlAgent())
    run = 0
    while wanted := await asyncio.to_thread(pipe.recv):
        run += 1
        slots = pool.allocate(RunHolder(run), wanted)
        for slot in slots:
            pool.view(slot)[:] = content
        pool.transfer(RunHolder(run), HandoffHolder(run), expires=SystemClock().monotonic() + 2)
        ticket = server.offer(HandoffHolder(run), kv_compat=COMPAT, on_done=on_done)
        lag = Lag()
        pipe.send((ticket, [BlockRef(slot=slot, generation=pool.generation(slot)) for slot in slots]))
        assert await ended.get() is Outcome.RELEASED
        pipe.send(lag.stop())
    await server.close()


# the reader


async def read(pipe: Connection, arguments: argparse.Namespace) -> dict[str, Figures]:
    count = arguments.tokens // BLOCK_TOKENS
    pool = new_pool(8 * count, arguments.block_bytes)
    mappings = MappedReader()
    readers = {carrier: Timed(READERS[carrier]()) for carrier in arguments.carriers}
    clients = {carrier: SocketTransferClient([reader]) for carrier, reader in readers.items()}
    figures = {carrier: Figures() for carrier in arguments.carriers}
    for turn in range(-3, arguments.rounds):  # the first rounds attach and warm up
        for carrier, client in clients.items():
            views = [pool.view(block) for block in random.sample(range(pool.total), 2 * count)]
            pipe.send(2 * count)
            ticket, offered = await asyncio.to_thread(pipe.recv)
            random.shuffle(offered)
            source = await mappings.memory(ticket)
            blocks, into = offered[:count], views[:count]
            if turn % 2:
                one_memcpy = _memcpy(source, offered[count:], views[count:])
            lag, started = Lag(), time.perf_counter()
            fetched = await client.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=10)
            assert await fetched.release()
            whole, late = time.perf_counter() - started, lag.stop()
            owner_late = await asyncio.to_thread(pipe.recv)
            if not turn % 2:
                one_memcpy = _memcpy(source, offered[count:], views[count:])
            if turn >= 0:
                rows = figures[carrier]
                rows.whole.append(whole)
                rows.copy.append(readers[carrier].took)
                rows.memcpy.append(one_memcpy)
                rows.reader_lag.append(late)
                rows.owner_lag.append(owner_late)
    pipe.send(0)
    mappings.close()
    for client in clients.values():
        client.close()
    return figures


def _memcpy(source: memoryview, blocks: list[BlockRef], into: list[memoryview]) -> float:
    started = time.perf_counter()
    for block, view in zip(blocks, into, strict=True):
        view[:] = source[block.slot * view.nbytes : (block.slot + 1) * view.nbytes]
    return time.perf_counter() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=51)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--block-bytes", type=int, default=368_640, help="SmolLM2-135M with float16 KV")
    options.add_argument("--carriers", nargs="+", choices=READERS, default=["tcp", "shm"])
    arguments = options.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    count = arguments.tokens // BLOCK_TOKENS
    child = multiprocessing.get_context("spawn").Process(target=own, args=(theirs, count, arguments.block_bytes))
    child.start()
    figures = uvloop.run(read(ours, arguments))
    child.join(10)
    report(figures, count * arguments.block_bytes)


def report(figures: dict[str, Figures], size: int) -> None:
    print(f"{size / 1e6:.1f} MB, {len(next(iter(figures.values())).whole)} rounds; ms")
    print(_row("", "whole p50", "p99", "copy p50", "GB/s", "memcpy", "GB/s", "ratio", "lag of reader", "of owner"))
    for carrier, rows in figures.items():
        whole, copy, memcpy = (statistics.median(row) for row in (rows.whole, rows.copy, rows.memcpy))
        worst = sorted(rows.whole)[round(0.99 * (len(rows.whole) - 1))]
        ratio = statistics.median(m / c for m, c in zip(rows.memcpy, rows.copy, strict=True))
        lags = (f"{_ms(statistics.median(lag))}, max {_ms(max(lag))}" for lag in (rows.reader_lag, rows.owner_lag))
        rates = (f"{size / took / 1e9:.1f}" for took in (copy, memcpy))
        print(_row(carrier, _ms(whole), _ms(worst), _ms(copy), next(rates), _ms(memcpy), next(rates), f"{ratio:.2f}", *lags))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _row(carrier: str, *cells: str) -> str:
    return f"{carrier:4}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, (10, 8, 10, 6, 8, 6, 7, 18, 18), strict=True)
    )


if __name__ == "__main__":
    main()
