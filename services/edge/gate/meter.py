"""Whether a request may run now, by the limits of its key and of its tenant; and what it used, once it has ended.

A request is counted before it is read; one to generate then reserves its largest possible use, in every limit and budget that it
falls under or in none of them. What it did not use comes back, and what it did is booked. Invariants: a reservation is settled
once; no limit is passed, over any number of edges; only a limit that is used up makes a 429, a counter that cannot be asked makes
a 503.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from schemas.errors import BusUnavailable, InvalidRequest, RateLimited, TokensLimited
from schemas.job import Tier
from services.bus.counters import Count
from services.clock import Clock
from services.edge.gate import windows
from services.edge.gate.allotment import Allotment, Verdict
from services.edge.gate.budgets import Budgets, Hold, unchecked
from services.edge.gate.limits import NONE, Limits
from services.edge.gate.records import Bill, Caller, Used
from services.telemetry.logs import AtMost, fields
from services.telemetry.metrics import Metrics

REQUESTS, TOKENS = "requests", "tokens"
_OVER = {REQUESTS: RateLimited, TOKENS: TokensLimited}
_MOST_KEPT = 10_000
_log = logging.getLogger("headrace.edge")

Add = Callable[[str, str, int, int], Awaitable[Count]]
"""(kind, owner, window, amount) → the counter; see `services.bus.counters`."""


@dataclass(frozen=True, slots=True)
class Taken:
    allotment: Allotment
    window: int
    amount: int


@dataclass(slots=True)
class Reservation:
    """What a request holds until it has ended. `taken`: of the limits of a minute."""

    caller: Caller
    budgets: Budgets
    taken: list[Taken] = field(default_factory=list)
    holds: list[Hold] = field(default_factory=list)
    ended: bool = False

    def settle(self, used: Used) -> None:
        """The request has ended. Safe to call twice, also after `undo`: the first counts."""
        if self.ended:
            return
        self.ended = True
        self._give_back(used.tokens)
        self.budgets.settle(self.holds, used.job, used.tokens)
        self.budgets.book(self.caller, used)

    def bill(self, model: str, prompt_tokens: int, price: float | None) -> Bill:
        """For the row of the request's job, which is booked with it."""
        counted = tuple((hold.purse.owner, hold.purse.window) for hold in self.holds if hold.purse.window != windows.RUNNING)
        return Bill(model=model, prompt_tokens=prompt_tokens, key=self.caller.key, price=price, budgets=counted)

    def hand_over(self, used_tokens: int) -> None:
        """The request's job was booked with its row, or another edge will do that. As `settle`, the first counts."""
        if self.ended:
            return
        self.ended = True
        self._give_back(used_tokens)
        self.budgets.hand_over(self.holds)

    def undo(self) -> None:
        """The request never ran."""
        if self.ended:
            return
        self.ended = True
        self._give_back(0)
        self.budgets.settle(self.holds, "", 0)

    def answered(self, status: int) -> None:
        """The request was counted, and gets this HTTP status. What we could not serve counts as none."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.undo()

    def _give_back(self, used_tokens: int) -> None:
        for one in self.taken:
            one.allotment.give_back(one.amount - min(used_tokens, one.amount), one.window)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Around what begins the request."""
        try:
            yield
        except BaseException:
            self.undo()
            raise


@dataclass(frozen=True, slots=True)
class Left:
    """Of one limit, as the headers tell it: the narrowest that the caller falls under. `reset_s`: seconds."""

    limit: int
    remaining: int
    reset_s: float


class Meter:
    """The allotments of one edge."""

    def __init__(self, add: Add, budgets: Budgets, clock: Clock, metrics: Metrics) -> None:
        self._add = add
        self._budgets = budgets
        self._clock = clock
        self._metrics = metrics
        self._may_log = AtMost(clock.monotonic, 10.0)
        self._allotments: OrderedDict[tuple[str, str, int], Allotment] = OrderedDict()

    async def count(self, caller: Caller) -> Reservation:
        """One more request of the minute. Raises `RateLimited`, `EdgeUnavailable`."""
        return await self._taken(caller, REQUESTS, 1)

    async def admit(self, caller: Caller, prompt_tokens: int, output_tokens: int, *, param: str = "messages") -> Reservation:
        """`output_tokens`: of all choices together, at most; `param`: the field that the prompt came from.

        Raises `InvalidRequest`, `RateLimited`, `InsufficientQuota`, `EdgeUnavailable`.
        """
        for limits in (caller.limits, caller.tenant_limits):
            _must_fit(limits, prompt_tokens, output_tokens, param)
        reservation = await self._taken(caller, TOKENS, prompt_tokens + output_tokens)
        with reservation.undone_on_failure():
            for kind, owner, limit in _budgets(caller):
                amount = 1 if kind == windows.RUNNING else prompt_tokens + output_tokens
                reservation.holds.append(await self._budgets.take(kind, owner, limit, amount, caller.tier))
        return reservation

    def nothing(self, caller: Caller) -> Reservation:
        """Of somebody who only reads what is counted elsewhere."""
        return Reservation(caller, self._budgets, ended=True)

    def left(self, caller: Caller, kind: str) -> Left | None:
        """None where the caller has no such limit."""
        found = [Left(one.limit, one.remaining, one.resets_in()) for one in self._of(caller, kind)]
        return min(found, key=lambda one: one.remaining, default=None)

    def allotments(self) -> Iterable[Allotment]:
        """Of all who asked lately."""
        return self._allotments.values()

    async def _taken(self, caller: Caller, kind: str, amount: int) -> Reservation:
        reservation = Reservation(caller, self._budgets)
        with reservation.undone_on_failure():
            for allotment in self._of(caller, kind):
                reservation.taken.append(await self._take(allotment, amount, caller.tier, kind))
        return reservation

    async def _take(self, allotment: Allotment, amount: int, tier: Tier, kind: str) -> Taken:
        window = allotment.window
        if tier is Tier.FREE and allotment.down:
            raise unchecked()
        match await allotment.take(amount):
            case Verdict.GRANTED:
                return Taken(allotment, window, amount)
            case Verdict.SPENT:
                text = f"Rate limit reached: {allotment.limit} {kind} per minute."
                raise _OVER[kind](text, retry_after=allotment.resets_in())
            case Verdict.UNKNOWN:
                raise unchecked()

    def _alarm(self, kind: str, error: BusUnavailable) -> None:
        self._metrics.counter_failures.add(1, {"kind": kind})
        if self._may_log() is not None:
            _log.warning("limits a minute cannot be checked: their counters cannot be used", extra=fields(error=error.message))

    def _of(self, caller: Caller, kind: str) -> list[Allotment]:
        """Of the key and of the tenant, where there is a limit."""
        named = ((owner, _limit(limits, kind)) for owner, limits in _owners(caller))
        return [self._allotment(kind, owner, limit) for owner, limit in named if limit is not None]

    def _allotment(self, kind: str, owner: str, limit: int) -> Allotment:
        name = (kind, owner, limit)
        found = self._allotments.get(name)
        if found is None:

            async def add(window: int, amount: int) -> Count:
                try:
                    return await self._add(kind, owner, window, amount)
                except BusUnavailable as error:
                    self._alarm(kind, error)
                    raise

            found = self._allotments[name] = Allotment(add, self._clock, limit)
            if len(self._allotments) > _MOST_KEPT:
                self._allotments.popitem(last=False)
        self._allotments.move_to_end(name)
        return found


def _owners(caller: Caller) -> tuple[tuple[str, Limits], ...]:
    return (f"key-{caller.key}", caller.limits), (f"tenant-{caller.tenant.name}", caller.tenant_limits)


def _budgets(caller: Caller) -> Iterator[tuple[str, str, int]]:
    """(kind, owner, limit) of what the database counts."""
    for owner, limits in _owners(caller):
        each = {windows.RUNNING: limits.concurrent, windows.DAY: limits.tokens_per_day, windows.MONTH: limits.tokens_per_month}
        yield from ((kind, owner, limit) for kind, limit in each.items() if limit is not None)


def _limit(limits: Limits, kind: str) -> int | None:
    return limits.requests_per_minute if kind == REQUESTS else limits.tokens_per_minute


def _must_fit(limits: Limits, prompt_tokens: int, output_tokens: int, param: str) -> None:
    """A request that can never run is told so, or its caller would try for ever. Raises `InvalidRequest`."""
    if limits is NONE:
        return
    if limits.prompt_tokens is not None and prompt_tokens > limits.prompt_tokens:
        raise InvalidRequest(f"Your prompt is {prompt_tokens} tokens; {limits.prompt_tokens} are allowed.", param=param)
    if limits.output_tokens is not None and output_tokens > limits.output_tokens:
        text = f"Up to {output_tokens} tokens were asked for; {limits.output_tokens} are allowed."
        raise InvalidRequest(text, param="max_tokens")
    whole = {"minute": limits.tokens_per_minute, "day": limits.tokens_per_day, "month": limits.tokens_per_month}
    for window, most in whole.items():
        if most is not None and prompt_tokens + output_tokens > most:
            text = f"This request may use {prompt_tokens + output_tokens} tokens, more than the {most} of a whole {window}."
            raise InvalidRequest(text, param="max_tokens")
