"""What one edge holds of one budget: an allotment out of the database, spent without asking it, until its lease ends.

Knows no database and no tasks: `ask` says what is to be exchanged for what, `take` what came of it. Invariants: what is held was
taken from the budget before; nothing is granted from what is lent no longer; what a running request was promised stays held until
it has ended and is in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

SLICES = 64
"""The parts that a budget is taken in, beyond what is needed at once."""
LEASE_S = 30.0
_MARGIN_S = 1.0
_RENEW_S = 10.0
_IDLE_S = 20.0
_SHORT_S = 0.25
"""How long a budget that had no room is believed to have none: others may give back."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What an edge has to keep, would like to have on top, and what of it the ledger gets now (`charges`: by job)."""

    owner: str
    window: str
    limit: int
    keep: int
    want: int
    charges: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Got:
    """`spent`: of the whole budget, as the ledger knows it."""

    granted: int
    spent: int


@dataclass(slots=True)
class Purse:
    """`free` can be given out; `promised` is what running requests may use; `used` is what ended ones did, not yet booked.

    `waiting`: the sum of what requests wait for. `recall`: what is free goes back before anything is granted.
    `stale`: less is held than the database was told.
    """

    owner: str
    window: str
    limit: int
    free: int = 0
    promised: int = 0
    used: int = 0
    waiting: int = 0
    spent: int = 0
    recall: bool = False
    stale: bool = False
    asked: float = -math.inf
    lent_until: float = -math.inf
    short_until: float = -math.inf
    last_grant: float = -math.inf
    charges: dict[str, int] = field(default_factory=dict)
    """Of `used`, by job: what the next exchange brings to the ledger."""

    @property
    def held(self) -> int:
        return self.free + self.promised + self.used

    def grant(self, amount: int, now: float) -> bool:
        if self.recall or now >= self.lent_until or amount > self.free:
            return False
        self.free -= amount
        self.promised += amount
        self.last_grant = now
        return True

    def low(self, now: float) -> bool:
        """More should be fetched before anybody waits for it."""
        return self.free < self._slice and now >= self.short_until

    def settle(self, amount: int, used: int, job: str) -> None:
        """A request that was promised `amount` has ended."""
        used = min(used, amount)
        self.promised -= amount
        self.free += amount - used
        if used:
            self.used += used
            self.charges[job] = self.charges.get(job, 0) + used

    def hand_over(self, amount: int) -> None:
        """What a request that runs was promised is counted by its row from now on: it is held here no more."""
        self.promised -= amount
        self.stale = True

    def change(self, limit: int) -> None:
        """Somebody changed the budget."""
        if limit != self.limit:
            self.limit, self.recall, self.short_until = limit, True, -math.inf

    def ask(self, now: float, jobs: Container[str] = (), *, over: bool = False) -> Ask | None:
        """What to exchange now, None = nothing. `jobs`: whose entries go with it. `over`: the window ended, or the edge does."""
        if now >= self.lent_until:
            self.free = 0  # others may have it
        charges = {job: tokens for job, tokens in self.charges.items() if job in jobs}
        idle = over or (not self.waiting and now - self.last_grant > _IDLE_S)
        surplus = self.free if self.recall or idle else max(0, self.free - 2 * self._slice - self.waiting)
        self.free -= surplus
        if surplus:
            self.stale = True
            self.short_until = -math.inf  # there is room: we made it
        want = 0
        if not idle and now >= self.short_until and (self.waiting or self.low(now)):
            want = max(0, self.waiting + 2 * self._slice - self.free)
        due = self.held > 0 and now > self.asked + _RENEW_S
        if not (want or charges or self.recall or self.stale or due):
            return None
        self.asked = now
        return Ask(self.owner, self.window, self.limit, self.held - sum(charges.values()), want, charges)

    def take(self, ask: Ask, got: Got, now: float) -> None:
        """What the database made of it."""
        for job, tokens in ask.charges.items():
            self.used -= tokens
            self.charges[job] -= tokens
            if not self.charges[job]:
                del self.charges[job]
        self.free += got.granted
        self.spent = got.spent
        self.stale = self.held < ask.keep + got.granted  # something was handed over meanwhile
        self.recall = self.recall and ask.limit != self.limit
        self.lent_until = self.asked + LEASE_S - _MARGIN_S
        self.short_until = now + _SHORT_S if got.granted < ask.want else -math.inf

    @property
    def empty(self) -> bool:
        return not (self.held or self.waiting or self.stale)

    @property
    def _slice(self) -> int:
        return self.limit // SLICES
