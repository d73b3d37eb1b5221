"""What two workers say on the connection of a KV transfer: Fetch → FetchAnswer and the blocks; Keep, …, Keep(done) → Released.

A frame is 4 bytes of little-endian length and one message. After a `FetchAnswer` that grants a `STREAM` fetch, each block follows
in the order of `Fetch`, as 8 bytes of little-endian xxh3_64 and the raw bytes of the block. For every other carrier `Checksums`
follow, until there is one for each block, and the reader takes the bytes itself, from memory that it attached on another
connection: Attach → Attached, and then nothing until one of the two ends.

These frames have a version of their own, which is part of `kv_compat`: who speaks another one is never handed anything.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.codec import Message
from schemas.numbers import Count, Random64, Whole

TRANSFER_SCHEMA = 1
TRANSFER_READS = range(TRANSFER_SCHEMA, TRANSFER_SCHEMA + 1)


class TransferMessage(Message, frozen=True, omit_defaults=True, kw_only=True):
    """Base of every frame."""

    schema: int = msgspec.field(default_factory=lambda: TRANSFER_SCHEMA)


class Carrier(StrEnum):
    """How the bytes of blocks get across. Tickets, leases, checksums and release are the same for all."""

    STREAM = "stream"
    MAPPED = "mapped"
    NIXL = "nixl"


class RefusalReason(StrEnum):
    """Why a ticket was not honoured."""

    UNKNOWN = "unknown_ticket"
    USED = "ticket_used"
    EXPIRED = "ticket_expired"
    INCOMPATIBLE = "kv_incompatible"
    BLOCKS = "blocks_not_offered"
    CARRIER = "no_such_carrier"


class Fetch(TransferMessage, frozen=True, omit_defaults=True, kw_only=True, tag_field="ask", tag="fetch"):
    """First frame of a fetch: the ticket's token and the wanted blocks as (slot, generation)."""

    token: bytes
    kv_compat: str
    blocks: tuple[tuple[Whole, Whole], ...] = ()
    carrier: Carrier = Carrier.STREAM


class FetchAnswer(TransferMessage, frozen=True, omit_defaults=True, kw_only=True):
    """`refused`: the last frame. Otherwise the blocks follow, and the lease counts from the last `Keep`."""

    refused: RefusalReason | None = None
    block_bytes: Count = 0


class Checksums(TransferMessage, frozen=True, omit_defaults=True, kw_only=True):
    """Of the next blocks: 8 bytes of little-endian xxh3_64 each."""

    digests: bytes


class Keep(TransferMessage, frozen=True, omit_defaults=True, kw_only=True):
    """The fetching side lives: renew its lease. `done`: it has verified every block, and says nothing more."""

    done: bool = False


class Released(TransferMessage, frozen=True, omit_defaults=True, kw_only=True):
    """The last frame. `ok`: until this moment every block was what was offered. Otherwise the copy is discarded."""

    ok: bool


class Attach(TransferMessage, frozen=True, omit_defaults=True, kw_only=True, tag_field="ask", tag="attach"):
    """First frame of a connection that gives access to a pool's memory. `token`: of a ticket that is still good, and stays so."""

    token: bytes
    carrier: Carrier


class Attached(TransferMessage, frozen=True, omit_defaults=True, kw_only=True):
    """`size`: bytes of the memory. `MAPPED`: one byte follows, which carries its descriptor (SCM_RIGHTS). `NIXL`: `agent` is
    the metadata of the owner's agent, `base` the address of the memory in its process.
    """

    refused: RefusalReason | None = None
    size: Count = 0
    agent: bytes = b""
    base: Random64 = 0


Opening = Fetch | Attach
"""What the first frame of a connection may be."""
