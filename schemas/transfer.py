"""What two workers say on the connection of a KV transfer: Fetch → FetchAnswer and the blocks; Keep, …, Keep(done) → Released.

A frame is 4 bytes of little-endian length and one message. After a `FetchAnswer` that grants, each block follows in the order of
`Fetch`, as 8 bytes of little-endian xxh3_64 and the raw bytes of the block.
"""

from __future__ import annotations

from enum import StrEnum

from schemas.codec import Message


class RefusalReason(StrEnum):
    """Why a ticket was not honoured."""

    UNKNOWN = "unknown_ticket"
    USED = "ticket_used"
    EXPIRED = "ticket_expired"
    INCOMPATIBLE = "kv_incompatible"
    BLOCKS = "blocks_not_offered"


class Fetch(Message, frozen=True, omit_defaults=True, kw_only=True):
    """First frame of the connection: the ticket's token and the wanted blocks as (slot, generation)."""

    token: bytes
    kv_compat: str
    blocks: tuple[tuple[int, int], ...] = ()


class FetchAnswer(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`refused`: the last frame. Otherwise the blocks follow, and the lease counts from the last `Keep`."""

    refused: RefusalReason | None = None
    block_bytes: int = 0


class Keep(Message, frozen=True, omit_defaults=True, kw_only=True):
    """The fetching side lives: renew its lease. `done`: it has verified every block, and says nothing more."""

    done: bool = False


class Released(Message, frozen=True, omit_defaults=True, kw_only=True):
    """The last frame. `ok`: until this moment every block was what was offered. Otherwise the copy is discarded."""

    ok: bool
