"""The transfer protocol as both sides see it, whatever carries the bytes: offer → fetch → release.

Owns: names, limits, outcomes. Must not know: sockets, processes. Invariant of every implementation: a fetched block is used only
after `release` returned True, which means that from offer to release it was never given out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

from schemas.errors import HeadraceError
from schemas.handoff import BlockRef, Ticket
from schemas.transfer import RefusalReason
from services.kv.holders import Holder


class Outcome(StrEnum):
    """How an offer ended. Only RELEASED says that the other side has the blocks; none proves a death."""

    RELEASED = "released"
    EXPIRED = "expired"
    LOST = "lost"


OnDone = Callable[[Holder, Outcome], None]
"""Called once when an offer ends by itself (not by `revoke`), after its blocks were released."""


class TransferError(HeadraceError):
    """The fetch failed; what was copied is to be discarded. Another attempt needs another ticket."""

    code = "transfer_failed"
    retryable = True


class FetchDenied(TransferError):
    """The serving side refused, and said why."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(f"KV fetch refused: {reason}")
        self.reason = reason


class ConnectionLost(TransferError):
    """The connection failed or ended early."""


class FetchTimeout(TransferError):
    """The whole fetch did not end in its time."""


class CorruptBlock(TransferError):
    """A block's bytes are not those whose checksum was taken, or not of the size agreed."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Times in seconds. A lease counts from its last renewal; `present_s` is how long the server itself renews an offer. Of the
    others, time in which this side stood still does not count."""

    lease_s: float = 2.0
    renew_s: float = 0.5
    present_s: float = 5.0
    first_frame_s: float = 2.0
    connection_s: float = 60.0
    release_s: float = 2.0
    connections: int = 256


DEFAULT_LIMITS = TransferLimits()
SILENT_S = DEFAULT_LIMITS.lease_s
"""A reader gives up a sender that stands still for this long: by then its lease is lost."""


class TransferServer(Protocol):
    """The side that has the blocks. `counts` by name: granted, released, expired, lost, revoked, refused reasons, garbage."""

    counts: dict[str, int]

    @property
    def address(self) -> str:
        """What goes into tickets."""
        ...

    def offer(self, holder: Holder, *, kv_compat: str, on_done: OnDone) -> Ticket:
        """Leave to fetch, once, blocks that `holder` has now; puts it under a lease. Raises LedgerError: it has none."""
        ...

    def revoke(self, holder: Holder) -> bool:
        """End an offer and release its blocks. False: it has ended already, and its outcome was reported."""
        ...

    async def close(self) -> None:
        """Refuse everything from now on; open offers end as LOST."""
        ...


class Fetched(Protocol):
    """Blocks that are copied and verified but not ours yet; the lease is renewed until `release` or `close`."""

    async def release(self) -> bool:
        """True: the blocks were valid all along and may be used. False: discard them. Ends the transfer. Never raises."""
        ...

    async def close(self) -> None:
        """End the transfer at once; without a `release` before it, the serving side sees it as lost. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class TransferClient(Protocol):
    """The side that wants the blocks."""

    async def fetch(
        self,
        ticket: Ticket,
        blocks: Sequence[BlockRef],
        into: Sequence[memoryview],
        *,
        kv_compat: str,
        timeout: float,
    ) -> Fetched:
        """Copy `blocks` (any part of the offer, any order) into the writable views `into`, one a block.

        The views belong to the transfer until this returns or raises. Raises TransferError; cancelling ends the
        connection at once.
        """
        ...
