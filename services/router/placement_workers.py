"""Workers as placement sees them, grouped by what may be paired.

Owns: no decision. Invariant: a pool holds workers of one `kv_compat` only, which may hand over to one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from schemas.state import Role

UNKNOWN_TOKEN_S = 0.0005
"""Seconds a prompt token while nobody of a pool has measured any: the order of places is then that of their tokens."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker of one model, with what this router placed since already taken off its credit.

    `free_at`: monotonic time at which the prompts it has are computed, as predicted. `token_s`: measured seconds of one uncached
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
    token_s: float = 0.0
    step_s: float = 0.0
    fetch_token_s: float = 0.0
    host: str = ""


@dataclass(slots=True)
class Pool:
    """Workers of one `kv_compat` by role and process. `token_s`: the newest measurement, for those that have none."""

    kv_compat: str
    weights: str
    block_tokens: int
    token_s: float = UNKNOWN_TOKEN_S
    prefill: dict[str, Worker] = field(default_factory=dict)
    decode: dict[str, Worker] = field(default_factory=dict)
    both: dict[str, Worker] = field(default_factory=dict)
    degraded: set[str] = field(default_factory=set)

    def of(self, role: Role) -> dict[str, Worker]:
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}[role]

    def put(self, worker: Worker) -> None:
        """The newest of this process."""
        self.of(worker.role)[worker.process] = worker
        (self.degraded.add if worker.degraded else self.degraded.discard)(worker.process)
        if worker.token_s:
            self.token_s = worker.token_s

    def workers(self) -> Iterator[Worker]:
        return chain(self.prefill.values(), self.decode.values(), self.both.values())

    def well(self, role: Role) -> dict[str, Worker]:
        """Those of `role` that are not degraded; all, when nobody else could take work."""
        members = self.of(role)
        if not self.degraded:
            return members
        return {process: worker for process, worker in members.items() if not worker.degraded and not worker.draining} or members

    def drop(self, process: str) -> None:
        self.degraded.discard(process)
        for members in (self.prefill, self.decode, self.both):
            members.pop(process, None)

    def __contains__(self, process: str) -> bool:
        return process in self.decode or process in self.both or process in self.prefill

    @property
    def empty(self) -> bool:
        return not (self.prefill or self.decode or self.both)


def pools(workers: Iterable[Worker]) -> list[Pool]:
    """`workers` of one model, grouped."""
    grouped: dict[str, Pool] = {}
    for worker in workers:
        pool = grouped.get(worker.kv_compat)
        if pool is None:
            pool = grouped[worker.kv_compat] = Pool(worker.kv_compat, worker.weights, worker.block_tokens)
        pool.put(worker)
    return list(grouped.values())
