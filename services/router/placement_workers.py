"""Workers as placement sees them, grouped by what may be paired, and in the order in which a decision wants to look at them.

Owns: no decision. Invariants: a pool holds workers of one `kv_compat` only, which may hand over to one another; its orders are
kept on each change, so that a decision can stop at the first worker that cannot be better than what it found.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from schemas.state import Role

UNKNOWN_TOKEN_S = 0.0005
"""Seconds a prompt token while nobody of a pool has measured any: the order of places is then that of their tokens."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker of one model, with what this router placed since already taken off its credit.

    `free_at`: monotonic time at which the prompts it has are computed, as predicted; `yield_s`: so much of that makes way for an
    urgent one, and `yield_queued` of the `queued` do. `token_s`: measured seconds of one uncached
    prompt token, 0 = not measured; `step_s`: of one decode step; `fetch_token_s`: of fetching one cached token from a decode
    worker, 0 = it cannot. `host`: "" = unknown. `degraded`: it may not be able to work (its connection ended, its engine stands
    still): it gets work only while its pool has nobody better.
    """

    process: str
    role: Role
    kv_compat: str
    weights: str
    context_length: int
    block_tokens: int
    kv_total: int
    queued: int = 0
    running: int = 0
    prefill_tokens: int = 0
    decode_slots: int = 0
    kv_blocks: int = 0
    draining: bool = False
    degraded: bool = False
    free_at: float = 0.0
    yield_s: float = 0.0
    yield_queued: int = 0
    token_s: float = 0.0
    step_s: float = 0.0
    fetch_token_s: float = 0.0
    host: str = ""


Entry = tuple[bool, float, str, Worker]
"""Degraded, key, process, worker: the well come first, in them the least."""


class Order:
    """Workers of one role by a key that is never more than what they cost. Who drains is in no order."""

    def __init__(self, key: Callable[[Worker], float]) -> None:
        self._key = key
        self._entries: list[Entry] = []

    def change(self, old: Worker | None, new: Worker | None) -> None:
        """`new` takes the place of `old`, which is what was put here last."""
        if old is not None and not old.draining:
            del self._entries[bisect_left(self._entries, (old.degraded, self._key(old), old.process))]
        if new is not None and not new.draining:
            insort(self._entries, (new.degraded, self._key(new), new.process, new))

    def well(self) -> Sequence[Entry]:
        """Those that are not degraded; all, when nobody else could take work."""
        entries = self._entries
        if not entries or not entries[-1][0]:
            return entries
        return entries[: bisect_left(entries, (True,))] or entries


def turned(entries: Sequence[Entry], width: float, random: Random) -> Sequence[Entry]:
    """`entries`, but any of those whose keys are within `width` of the least comes first, one as likely as another."""
    degraded, least, *_ = entries[0]
    alike = bisect_left(entries, (degraded, least + width))
    start = random.randrange(alike) if alike else 0
    return [*entries[start:alike], *entries[:start], *entries[alike:]]


def by_wait(worker: Worker) -> float:
    """The cost of a prompt here is at least the wait until this time."""
    return worker.free_at


def by_urgent_wait(worker: Worker) -> float:
    """That of an urgent one."""
    return worker.free_at - worker.yield_s


def by_load(worker: Worker) -> float:
    """The share of the KV blocks or of the batch that is taken before anything is added; whoever has no room comes last."""
    if worker.decode_slots < 1 or not worker.kv_total:
        return float("inf")
    return max(1 - worker.kv_blocks / worker.kv_total, (worker.running + 1) / (worker.running + worker.decode_slots))


@dataclass(slots=True)
class Pool:
    """Workers of one `kv_compat` by role and process.

    `token_s`: the newest measurement, for those that have none. Bounds, which may be too generous: `fastest_s`, the least ever;
    `shortest_step_s` of a decode worker, and `largest_step`, the most prompt tokens that one ever had credit for. `to_end`: their
    engine begins only what it can end, so that room is reserved to the end.
    """

    kv_compat: str
    weights: str
    block_tokens: int
    token_s: float = UNKNOWN_TOKEN_S
    fastest_s: float = float("inf")
    shortest_step_s: float = float("inf")
    largest_step: int = 0
    to_end: bool = False
    prefill: dict[str, Worker] = field(default_factory=dict)
    decode: dict[str, Worker] = field(default_factory=dict)
    both: dict[str, Worker] = field(default_factory=dict)
    _orders: dict[Role, tuple[Order, ...]] = field(
        default_factory=lambda: {
            Role.PREFILL: (Order(by_wait), Order(by_urgent_wait)),
            Role.DECODE: (Order(by_load),),
            Role.BOTH: (Order(by_wait), Order(by_urgent_wait)),
        }
    )
    _on_host: dict[str, dict[str, Worker]] = field(default_factory=dict)

    def of(self, role: Role) -> dict[str, Worker]:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}[role]

    def put(self, worker: Worker) -> None:
        """The newest of this process."""
        members = self.of(worker.role)
        self._change(worker.role, members.get(worker.process), worker)
        members[worker.process] = worker
        if worker.token_s:
            self.token_s = worker.token_s
            self.fastest_s = min(self.fastest_s, worker.token_s)
        if worker.role is Role.DECODE:
            self.shortest_step_s = min(self.shortest_step_s, worker.step_s)
            self.largest_step = max(self.largest_step, worker.prefill_tokens)

    def drop(self, process: str) -> None:
        for role in self._orders:
            self._change(role, self.of(role).pop(process, None), None)

    def well(self, role: Role, urgent: bool = False) -> Sequence[Entry]:
        """Those of `role` that may take work, least first, as an `urgent` request sees them."""
        orders = self._orders[role]
        return orders[urgent and len(orders) > 1].well()

    def decode_on(self, host: str) -> Collection[Worker]:
        """The decode workers of `host`, whatever state they are in."""
        return self._on_host.get(host, {}).values()

    def workers(self) -> Iterator[Worker]:
        return chain(self.prefill.values(), self.decode.values(), self.both.values())

    def __contains__(self, process: str) -> bool:
        return process in self.decode or process in self.both or process in self.prefill

    @property
    def empty(self) -> bool:
        return not (self.prefill or self.decode or self.both)

    def _change(self, role: Role, old: Worker | None, new: Worker | None) -> None:
        for order in self._orders[role]:
            order.change(old, new)
        if old is not None and old.host and role is Role.DECODE:
            there = self._on_host[old.host]
            del there[old.process]
            if not there:
                del self._on_host[old.host]
        if new is not None and new.host and role is Role.DECODE:
            self._on_host.setdefault(new.host, {})[new.process] = new


def pools(workers: Iterable[Worker]) -> list[Pool]:
    """`workers` of one model, grouped."""
    grouped: dict[str, Pool] = {}
    for worker in workers:
        pool = grouped.get(worker.kv_compat)
        if pool is None:
            pool = grouped[worker.kv_compat] = Pool(worker.kv_compat, worker.weights, worker.block_tokens)
        pool.put(worker)
    return list(grouped.values())
