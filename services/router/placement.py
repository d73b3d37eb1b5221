"""Where a job goes: a pure function of what is seen of the workers, the job and a source of randomness.

Knows no bus, no clock and no prices. Invariant: a worker is chosen only with credit, and a job that some live worker has
credit for is placed. The worker has the last word; who refuses is passed in `without`, and the next best is chosen.

Seam: a smarter policy replaces `_Pool.best`; who *may* be chosen is decided before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from schemas.errors import ContextLengthExceeded, HeadraceError, ModelChanged, ModelLoading
from schemas.job import Job
from schemas.state import Role

RETRY_LOADING_S = 5.0
"""How soon to ask again for a model that no live worker serves."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A live worker of one model, with what this router placed since already taken off its credit.

    `degraded`: it may not be able to work (its connection ended, its engine stands still). It gets work only while its pool has
    nobody better.
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

    def blocks(self, tokens: int) -> int:
        """KV blocks that a prompt of `tokens` fills."""
        return -(-tokens // self.block_tokens)

    @property
    def prefill_load(self) -> float:
        return self.queued + self.running

    @property
    def decode_load(self) -> float:
        """The share of its KV blocks in use or promised. Unlike the runs in its batch it counts reservations."""
        return 1 - self.kv_blocks / self.kv_total


@dataclass(frozen=True, slots=True)
class Request:
    """What placement must know of a job. `tokens`: prompt and what earlier attempts generated. `weights`: "" = any.

    `suspect`: it may kill its worker, so all such jobs of a pool go to one worker, one after another. `branches`: of several open
    choices, how much each has generated; `tokens` counts the longest.
    """

    tokens: int
    weights: str = ""
    suspect: bool = False
    branches: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job) -> Request:
        generated = tuple(len(choice.generated) for choice in job.open_choices)
        branches = generated if len(generated) > 1 else ()
        return cls(job.prompt_tokens + max(generated), job.weights, job.suspect, branches)

    def room(self, worker: Worker) -> int:
        """Blocks to reserve: the prompt's, once, and for each choice what it has generated and one to write next."""
        if not self.branches:
            return worker.blocks(self.tokens) + 1
        prompt = self.tokens - max(self.branches)
        return worker.blocks(prompt) + sum(worker.blocks(generated) + 1 for generated in self.branches)


@dataclass(frozen=True, slots=True)
class Pair:
    """Prefill on one worker, decode on another. `blocks` to reserve on decode."""

    prefill: str
    decode: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Local:
    """Both phases on one worker."""

    decode: str
    blocks: int


@dataclass(frozen=True, slots=True)
class NoCredit:
    """Not now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Impossible:
    """Not by any worker that is alive; waiting for credit cannot help."""

    error: HeadraceError


Decision = Pair | Local | NoCredit | Impossible


def place(workers: Sequence[Worker], request: Request, random: Random, without: frozenset[str] = frozenset()) -> Decision:
    """The least loaded way to run `request` on live `workers` of its model, ties at random, never using one of `without`."""
    if not workers:
        return Impossible(ModelLoading("The model is not loaded yet.", retry_after=RETRY_LOADING_S))
    same = [worker for worker in workers if not request.weights or worker.weights == request.weights]
    if not same:
        return Impossible(ModelChanged("The model was replaced while this request was running."))
    usable = [pool for pool in _pools(worker for worker in same if not worker.draining) if pool.complete]
    if not usable:
        return NoCredit("no_pair")
    tokens = request.tokens
    fitting = [pool.where(lambda w: _prefill_fits(w, tokens), lambda w: _decode_fits(w, request)) for pool in usable]
    if not any(pool.complete for pool in fitting):
        return Impossible(ContextLengthExceeded(f"{tokens} tokens are more than this model can take.", param="messages"))
    if request.suspect:
        fitting = [pool.first() for pool in fitting]
    ready = [
        pool.where(
            lambda w: w.process not in without and has_prefill_credit(w, tokens),
            lambda w: w.process not in without and has_decode_credit(w, request),
        )
        for pool in fitting
    ]
    ways = [way for pool in ready for way in pool.best(request, random)]
    return _least(ways, lambda way: way[0], random)[1] if ways else NoCredit("no_credit")


def has_prefill_credit(worker: Worker, tokens: int) -> bool:
    """A worker with nothing queued takes a prompt of any length: it is cut into steps."""
    return worker.queued == 0 or worker.prefill_tokens >= tokens


def has_decode_credit(worker: Worker, request: Request) -> bool:
    """One slot is enough for any number of choices: rows beyond the batch wait for a step."""
    return worker.decode_slots >= 1 and worker.kv_blocks >= request.room(worker)


def _prefill_fits(worker: Worker, tokens: int) -> bool:
    return tokens < worker.context_length and worker.blocks(tokens) <= worker.kv_total


def _decode_fits(worker: Worker, request: Request) -> bool:
    return request.tokens < worker.context_length and request.room(worker) <= worker.kv_total


T = TypeVar("T")
_Way = tuple[float, Pair | Local]
_Test = Callable[[Worker], bool]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Workers of one `kv_compat`, which may hand over to one another."""

    prefill: tuple[Worker, ...]
    decode: tuple[Worker, ...]
    local: tuple[Worker, ...]

    @property
    def complete(self) -> bool:
        return bool(self.local or (self.prefill and self.decode))

    def where(self, prefill: _Test, decode: _Test) -> _Pool:
        """The pool of those that pass the test of each phase they would run."""
        return _Pool(
            tuple(filter(prefill, self.prefill)),
            tuple(filter(decode, self.decode)),
            tuple(worker for worker in self.local if prefill(worker) and decode(worker)),
        )

    def first(self) -> _Pool:
        """The pool of one worker a phase, the same whoever asks."""
        parts = (self.prefill, self.decode, self.local)
        prefill, decode, local = (tuple(sorted(part, key=lambda w: w.process)[:1]) for part in parts)
        return _Pool(prefill, decode, () if prefill and decode else local)

    def best(self, request: Request, random: Random) -> list[_Way]:
        """The least loaded pair and the least loaded local worker, each with its load."""
        ways: list[_Way] = []
        if self.prefill and self.decode:
            first = _least(self.prefill, lambda w: w.prefill_load, random)
            then = _least(self.decode, lambda w: w.decode_load, random)
            pair = Pair(first.process, then.process, request.room(then))
            ways.append((first.prefill_load + then.decode_load, pair))
        if self.local:
            one = _least(self.local, lambda w: w.prefill_load + w.decode_load, random)
            ways.append((one.prefill_load + one.decode_load, Local(one.process, request.room(one))))
        return ways


def _pools(workers: Iterable[Worker]) -> list[_Pool]:
    by_compat: dict[str, list[Worker]] = {}
    for worker in workers:
        by_compat.setdefault(worker.kv_compat, []).append(worker)
    return [_pool(members) for members in by_compat.values()]


def _pool(members: Sequence[Worker]) -> _Pool:
    prefill, decode, both = (
        _well_or_all([worker for worker in members if worker.role is role]) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)
    )
    return _Pool(prefill, decode, both if prefill else both + decode)


def _well_or_all(members: Sequence[Worker]) -> tuple[Worker, ...]:
    """Without the degraded, unless nobody else is left."""
    return tuple(worker for worker in members if not worker.degraded) or tuple(members)


def _least(items: Sequence[T], load: Callable[[T], float], random: Random) -> T:
    least = min(load(item) for item in items)
    return random.choice([item for item in items if load(item) == least])
