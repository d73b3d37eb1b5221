"""Budgets of tokens and of running requests, over all edges, and the ledger of what was used: one exchange with the database.

Owns the purses, the entries that wait to be booked, and the task that carries both there, each `FLUSH_S` and when somebody waits.
Invariants: over any number of edges no budget is given out twice; an entry is booked once, by its job's id; no request waits for
the database unless its edge holds too little, and then `patience` seconds at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from schemas.errors import EdgeUnavailable, HeadraceError, InsufficientQuota, RateLimited, StoreUnavailable
from schemas.job import Tier
from services.clock import Clock
from services.edge.gate import windows
from services.edge.gate.purse import LEASE_S, Ask, Got, Purse
from services.edge.gate.records import Caller, Entry, Used
from services.telemetry import names
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

FLUSH_S = 0.5
PATIENCE_S = 0.5
CLOSE_S = 5.0
_DOWN_S = 0.25
_MOST_AT_ONCE = 5_000
_MOST_BEHIND = 200_000
"""Entries kept while the database is away; what is used beyond is counted as lost."""
_log = logging.getLogger("headrace.edge")
Key = tuple[str, str]
"""(owner, window)"""


class UsageStore(Protocol):
    async def exchange(self, edge: str, entries: Sequence[Entry], asks: Sequence[Ask], lease_s: float) -> Mapping[Key, Got]:
        """Book what is not booked yet, then answer each ask. All or nothing; may be repeated. Raises `StoreUnavailable`."""
        ...


@dataclass(frozen=True, slots=True)
class Hold:
    """What one request was promised."""

    purse: Purse
    amount: int


class Budgets:
    """`edge`: the id of this process, never used again."""

    def __init__(self, store: UsageStore, edge: str, clock: Clock, metrics: Metrics, patience: float = PATIENCE_S) -> None:
        self._store = store
        self._edge = edge
        self._clock = clock
        self._metrics = metrics
        self._patience = patience
        self._purses: dict[Key, Purse] = {}
        self._entries: list[Entry] = []
        self._kicked = asyncio.Event()
        self._answered = asyncio.Event()
        self._down_until = 0.0
        self._closing = False
        self._may_log = AtMost(clock.monotonic, 10.0)
        metrics.gauge(names.USAGE_BEHIND, lambda: float(len(self._entries)))

    @property
    def down(self) -> bool:
        """Whether the database could not be used a moment ago."""
        return self._clock.monotonic() < self._down_until

    async def take(self, kind: str, owner: str, limit: int, amount: int, tier: Tier) -> Hold:
        """`amount` of the budget, all or nothing. Raises `InsufficientQuota`, `RateLimited`, `EdgeUnavailable`."""
        if tier is Tier.FREE and self.down:
            raise unchecked()
        purse = self._purse(owner, windows.name(kind, self._clock.wall()), limit)
        if not purse.grant(amount, self._clock.monotonic()):
            await self._wait(purse, kind, amount)
        if purse.low(self._clock.monotonic()):
            self._kicked.set()
        return Hold(purse, amount)

    def settle(self, holds: Sequence[Hold], job: str, used_tokens: int) -> None:
        """The request has ended; of what runs at once nothing is used up."""
        for hold in holds:
            running = hold.purse.window == windows.RUNNING
            hold.purse.settle(hold.amount, 0 if running else used_tokens, job)
            if running:
                self._kicked.set()  # another edge may need the place

    def hand_over(self, holds: Sequence[Hold]) -> None:
        """The request's job has a row that counts what it uses, or has counted it."""
        for hold in holds:
            if hold.purse.window == windows.RUNNING:
                hold.purse.settle(hold.amount, 0, "")
            else:
                hold.purse.hand_over(hold.amount)
            self._kicked.set()

    def book(self, caller: Caller, used: Used) -> None:
        """An entry of the ledger, written within `FLUSH_S` while the database can be used."""
        entry = Entry(caller.tenant.name, caller.key, used)
        measure(self._metrics, entry)
        if len(self._entries) >= _MOST_BEHIND:
            self._metrics.usage_lost.add(1)
            return
        self._entries.append(entry)

    async def run(self) -> None:
        """Until cancelled; then `close`."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._kicked.wait()
            self._kicked.clear()
            if not await self._flushed():
                await asyncio.sleep(_DOWN_S)

    async def close(self) -> None:
        """Book the rest and give back what is held. For what was used, a database that is away is asked again for `CLOSE_S`."""
        self._closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._empty()
        if self._entries:
            self._metrics.usage_lost.add(len(self._entries))
            _log.error("usage is lost: the database could not be used to the end", extra=fields(entries=len(self._entries)))

    async def _empty(self) -> None:
        """Until nothing is left but what stays held, or what an unusable database cannot be given back."""
        while self._entries or self._purses:
            before = len(self._entries)
            booked = await self.flush()
            if len(self._entries) == before and (booked or not before):
                return
            if not booked:
                await asyncio.sleep(_DOWN_S)

    async def flush(self) -> bool:
        """One exchange; False when the database cannot be used."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        current = {windows.name(kind, wall) for kind in (windows.DAY, windows.MONTH, windows.RUNNING)}
        entries = self._entries[:_MOST_AT_ONCE]
        jobs = {entry.used.job for entry in entries}
        asks = {}
        for key, purse in self._purses.items():
            over = self._closing or (purse.window not in current and not purse.waiting)  # who waits came in that window
            if (ask := purse.ask(now, jobs, over=over)) is not None:
                asks[key] = ask
        if not entries and not asks:
            return True
        try:
            got = await self._store.exchange(self._edge, entries, list(asks.values()), LEASE_S)
        except StoreUnavailable as error:
            self._failed(error)
            return False
        self._down_until = 0.0
        del self._entries[: len(entries)]
        for key, ask in asks.items():
            self._purses[key].take(ask, got[key], self._clock.monotonic())
            if self._purses[key].empty:
                del self._purses[key]
        self._wake()
        return True

    async def _flushed(self) -> bool:
        """As `flush`; a fault of ours stops no other edge's or tenant's accounts either."""
        try:
            return await self.flush()
        except Exception:
            _log.exception("usage was not booked; it is tried again")
            return False

    def _failed(self, error: HeadraceError) -> None:
        self._down_until = self._clock.monotonic() + 2 * _DOWN_S
        self._metrics.store_failures.add(1, {"operation": "usage"})
        if self._may_log() is not None:
            _log.warning("usage is not booked: the database cannot be used", extra=fields(error=error.__cause__ or error))
        self._wake()

    def _wake(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()

    async def _wait(self, purse: Purse, kind: str, amount: int) -> None:
        """Until the purse has granted it. Raises as `take`."""
        deadline = self._clock.monotonic() + self._patience
        purse.waiting += amount
        try:
            while not purse.grant(amount, now := self._clock.monotonic()):
                if now < purse.short_until:
                    raise self._refusal(purse, kind, amount)
                if now >= deadline or self.down:
                    raise unchecked()
                self._kicked.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout(deadline - now):
                        await self._answered.wait()
        finally:
            purse.waiting -= amount

    def _refusal(self, purse: Purse, kind: str, amount: int) -> HeadraceError:
        """Only what is spent is spent: what others are promised may come back."""
        if kind == windows.RUNNING:
            return RateLimited(f"Too many requests at once: {purse.limit} may run.", retry_after=1.0)
        if purse.spent + purse.used + amount > purse.limit:
            reset = windows.resets_in(kind, self._clock.wall())
            return InsufficientQuota(f"The budget of {purse.limit} tokens a {kind} is spent.", retry_after=reset)
        text = f"What is left of the {purse.limit} tokens a {kind} is promised to requests that run."
        return RateLimited(text, retry_after=1.0)

    def _purse(self, owner: str, window: str, limit: int) -> Purse:
        key = (owner, window)
        found = self._purses.get(key)
        if found is None:
            found = self._purses[key] = Purse(owner, window, limit)
        found.change(limit)
        return found


def measure(metrics: Metrics, entry: Entry) -> None:
    """Compute and cost, for whoever watches them."""
    labels = {"tenant": entry.tenant, "model": entry.used.model}
    metrics.compute.add(entry.used.compute_s, labels)
    metrics.cost.add(entry.used.cost or 0.0, labels)


def unchecked() -> EdgeUnavailable:
    """Whether a limit is kept cannot be told now."""
    return EdgeUnavailable("The limits cannot be checked now.", retry_after=1.0)
