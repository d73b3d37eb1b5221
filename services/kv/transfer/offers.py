"""The serving side's book of offers: tickets, leases, generations; no I/O, so every carrier of bytes obeys the same rules.

Owns: what a ticket is worth, and when an offer ends. Must not know: sockets. Invariant: an offer is open exactly as long as its
holder has its blocks under a lease that has not run out; it ends once, with one outcome, and ending releases the blocks.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schemas.transfer import RefusalReason
from services.clock import Clock
from services.kv.holders import Holder
from services.kv.pool import BlockPool, LedgerError
from services.kv.transfer.interface import FetchDenied, OnDone, Outcome, TransferLimits

_REMEMBERED = 1024
_NAME_BYTES, _SECRET_BYTES = 8, 16
TOKEN_BYTES = _NAME_BYTES + _SECRET_BYTES
"""A token is a public name, by which it is looked up, and 128 secret bits, which are compared in constant time."""


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks of `holder` by generation. `present_by`: until then this side renews, unless the ticket was presented."""

    holder: Holder
    token: bytes
    kv_compat: str
    generations: dict[int, int]
    present_by: float
    on_done: OnDone
    presented: bool = False


@dataclass(slots=True)
class OfferBook:
    """All offers of one pool. `random_bytes(n)` must be unpredictable; `on_end` hears of every end, `revoke` included."""

    pool: BlockPool
    clock: Clock
    limits: TransferLimits
    random_bytes: Callable[[int], bytes]
    on_end: Callable[[Offer], None]
    counts: dict[str, int]
    _open: dict[bytes, Offer] = field(default_factory=dict)
    _by_holder: dict[Holder, Offer] = field(default_factory=dict)
    _ended: OrderedDict[bytes, tuple[bytes, RefusalReason]] = field(default_factory=OrderedDict)

    def open(self, holder: Holder, kv_compat: str, on_done: OnDone) -> Offer:
        """Offer what `holder` has. Raises LedgerError when that is nothing, or is on offer already."""
        now = self.clock.monotonic()
        if holder in self._by_holder or not self.pool.renew(holder, now + self.limits.lease_s, now=now):
            raise LedgerError(f"{holder} has no blocks that could be offered")
        generations = {block: self.pool.generation(block) for block in self.pool.blocks(holder)}
        offer = Offer(holder, self.random_bytes(TOKEN_BYTES), kv_compat, generations, now + self.limits.present_s, on_done)
        self._open[offer.token[:_NAME_BYTES]] = offer
        self._by_holder[holder] = offer
        return offer

    def present(self, token: bytes, kv_compat: str, blocks: Sequence[tuple[int, int]]) -> Offer:
        """The offer that `token` opens, once, for `blocks` as (slot, generation). Raises FetchDenied.

        A valid ticket with a wrong request ends the offer: its only reader cannot use it.
        """
        offer = self._redeem(token)
        if offer.kv_compat != kv_compat:
            raise self._deny(offer, RefusalReason.INCOMPATIBLE)
        if len(blocks) > len(offer.generations) or any(offer.generations.get(slot) != g for slot, g in blocks):
            raise self._deny(offer, RefusalReason.BLOCKS)
        offer.presented = True
        self.renew(offer)
        self._count("granted")
        return offer

    def admit(self, token: bytes) -> None:
        """Raises FetchDenied unless `token` opens an offer, which stays as it is."""
        self._redeem(token)

    def is_open(self, offer: Offer) -> bool:
        """True while the offered blocks may be read."""
        is_listed = self._by_holder.get(offer.holder) is offer
        return is_listed and self.pool.alive(offer.holder, self.clock.monotonic())

    def renew(self, offer: Offer) -> None:
        """The reader is alive. A lease that has run out, or an offer that has ended, stays so."""
        if self.is_open(offer):
            now = self.clock.monotonic()
            self.pool.renew(offer.holder, now + self.limits.lease_s, now=now)

    def release(self, offer: Offer) -> bool:
        """The reader has its copy. True when every block was, from offer to now, what was offered."""
        if not self.is_open(offer):
            self._end_if_listed(offer, Outcome.EXPIRED)
            return False
        intact = all(self.pool.generation(block) == g for block, g in offer.generations.items())
        self._end_if_listed(offer, Outcome.RELEASED if intact else Outcome.EXPIRED)
        return intact

    def lose(self, offer: Offer) -> None:
        """The connection ended. Nothing happens to an offer that ended before it."""
        self._end_if_listed(offer, Outcome.LOST if self.is_open(offer) else Outcome.EXPIRED)

    def revoke(self, holder: Holder) -> bool:
        """The owner takes the offer back. False when it is not open."""
        offer = self._by_holder.get(holder)
        if offer is None:
            return False
        self._end(offer, RefusalReason.UNKNOWN, "revoked")
        return True

    def lose_all(self) -> None:
        for offer in list(self._open.values()):
            self.lose(offer)

    async def watch(self) -> None:
        """Renew what was not presented yet, end what ran out; for as long as the server lives."""
        while True:
            await asyncio.sleep(min(self.limits.renew_s, self.limits.lease_s / 4))
            self.sweep()

    def sweep(self) -> None:
        """One round of `watch`."""
        now = self.clock.monotonic()
        for offer in list(self._open.values()):
            if not offer.presented:
                self.pool.renew(offer.holder, min(now + self.limits.lease_s, offer.present_by), now=now)
            if not self.is_open(offer):
                self._end_if_listed(offer, Outcome.EXPIRED)

    def _redeem(self, token: bytes) -> Offer:
        name, secret = token[:_NAME_BYTES], token[_NAME_BYTES:]
        offer = self._open.get(name)
        if offer is None:
            past_secret, reason = self._ended.get(name, (b"", RefusalReason.UNKNOWN))
            raise self._refusal(reason if hmac.compare_digest(past_secret, secret) else RefusalReason.UNKNOWN)
        if not hmac.compare_digest(offer.token[_NAME_BYTES:], secret):
            raise self._refusal(RefusalReason.UNKNOWN)
        if offer.presented:
            raise self._refusal(RefusalReason.USED)
        if not self.is_open(offer):
            self._end_if_listed(offer, Outcome.EXPIRED)
            raise self._refusal(RefusalReason.EXPIRED)
        return offer

    def _deny(self, offer: Offer, reason: RefusalReason) -> FetchDenied:
        offer.presented = True
        self._end_if_listed(offer, Outcome.LOST)
        return self._refusal(reason)

    def _refusal(self, reason: RefusalReason) -> FetchDenied:
        self._count(reason)
        return FetchDenied(reason)

    def _end_if_listed(self, offer: Offer, outcome: Outcome) -> None:
        if self._by_holder.get(offer.holder) is not offer:
            return
        self._end(offer, RefusalReason.USED if offer.presented else RefusalReason.EXPIRED, outcome)
        offer.on_done(offer.holder, outcome)

    def _end(self, offer: Offer, later: RefusalReason, count: str) -> None:
        name, secret = offer.token[:_NAME_BYTES], offer.token[_NAME_BYTES:]
        del self._open[name]
        del self._by_holder[offer.holder]
        self._ended[name] = (secret, later)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        self.pool.release(offer.holder)
        self._count(count)
        self.on_end(offer)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
