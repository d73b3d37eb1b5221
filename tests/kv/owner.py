"""A process that offers blocks of its pool, for tests that stop and kill it. Says one line: ticket, blocks, their bytes' digest.

Arguments: how many blocks, how they may be fetched, and the seconds of a lease. It lives until it is ended, or until its offer
has ended: then it says how, and leaves.
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
from typing import cast

import msgspec
import xxhash

from schemas.handoff import BlockRef, Ticket
from services.clock import SystemClock
from services.kv import memory
from services.kv.holders import HandoffHolder, Holder, RunHolder
from services.kv.pool import BlockPool
from services.kv.transfer.auto import TransferKind, nixl_agent, open_carriers
from services.kv.transfer.interface import Outcome, TransferLimits
from services.kv.transfer.server import SocketTransferServer

BLOCK_BYTES = 1 << 16
COMPAT = "kv-compat"


class Line(msgspec.Struct):
    """What the process says first."""

    ticket: Ticket
    blocks: list[BlockRef]
    digest: int


def read_line(text: bytes) -> Line:
    return msgspec.msgpack.decode(base64.b64decode(text), type=Line)


async def main(count: int, kind: TransferKind, lease_s: float) -> None:
    own = memory.allocate(count * BLOCK_BYTES)
    own.view[:] = random.Random(1).randbytes(count * BLOCK_BYTES)
    pool = BlockPool(count, block_bytes=BLOCK_BYTES, memory=own.view, fd=own.fd)
    ended: asyncio.Queue[Outcome] = asyncio.Queue()

    def on_done(holder: Holder, outcome: Outcome) -> None:
        ended.put_nowait(outcome)

    limits = TransferLimits(lease_s=lease_s, present_s=60.0, first_frame_s=60.0)
    server = SocketTransferServer(pool, clock=SystemClock(), limits=limits)
    await server.start("127.0.0.1", 0)
    await open_carriers(server, kind, nixl_agent(kind))
    slots = pool.allocate(RunHolder(1), count)
    pool.transfer(RunHolder(1), HandoffHolder(1), expires=SystemClock().monotonic() + 1)
    blocks = [BlockRef(slot=slot, generation=pool.generation(slot)) for slot in slots]
    digest = xxhash.xxh3_64_intdigest(b"".join(pool.view(slot) for slot in slots))
    line = Line(server.offer(HandoffHolder(1), kv_compat=COMPAT, on_done=on_done), blocks, digest)
    print(base64.b64encode(msgspec.msgpack.encode(line)).decode(), flush=True)
    print(await ended.get(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), cast("TransferKind", sys.argv[2]), float(sys.argv[3])))
