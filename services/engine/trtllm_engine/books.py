"""What TensorRT-LLM's KV pool is used for, in our ledger: its blocks are its own, we keep count of them.

Owns the estimate: a run's blocks, a handoff's until it was fetched (*pinned*), what the engine uses beside them (*untracked*).
Must not know requests. Invariant: after `observe`, the ledger calls no fewer blocks used than the engine does.
"""

from __future__ import annotations

from services.clock import Clock
from services.kv.holders import PinnedHolder, RunHolder, UntrackedHolder
from services.kv.pool import BlockPool, PoolExhausted

_UNTRACKED = UntrackedHolder(0)
LEASES = 2.0
"""Transfer timeouts after which a pinned handoff is given up in the books, should the engine no longer say what it uses."""


class Books:
    """`timeout_s`: when the engine gives up a handoff that nobody fetched."""

    def __init__(self, pool: BlockPool, block_tokens: int, timeout_s: float, clock: Clock) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._pinned: dict[int, float] = {}
        """Since when."""
        self._late: set[int] = set()
        """Of the pinned."""
        self._newly_late = 0
        self._untracked: list[int] = []

    # a run

    def begin(self, run: int, tokens: int) -> None:
        """Room for `tokens`, with what the run has reserved. Raises PoolExhausted.

        That is all it will ever have: the engine begins only what it can end (GUARANTEED_NO_EVICT), so it counts the same way.
        """
        self._pool.claim(RunHolder(run), max(self._blocks(tokens), len(self._pool.blocks(RunHolder(run)))))

    def begin_anyway(self, run: int, tokens: int) -> None:
        """The same for a handoff that must be consumed: less room than it needs is no reason to refuse it."""
        try:
            self.begin(run, tokens)
        except PoolExhausted:
            reserved = len(self._pool.blocks(RunHolder(run)))
            self._pool.claim(RunHolder(run), max(reserved, min(self._blocks(tokens), reserved + self._pool.available)))

    def end(self, run: int) -> None:
        self._pool.release(RunHolder(run))

    def pin(self, run: int) -> None:
        """The run is handed off: the engine keeps its blocks until they are fetched."""
        now = self._clock.monotonic()
        self._pool.transfer(RunHolder(run), PinnedHolder(run), expires=now + LEASES * self._timeout_s)
        self._pinned[run] = now

    # what the engine says

    def observe(self, used: int) -> None:
        """The engine uses `used` blocks: what it has fewer than the books was fetched, what it has more is nobody's."""
        self._look_for_late()
        self._forget_lapsed()
        explained = self._pool.held - self._reserved() - len(self._untracked)
        for run in list(self._pinned):
            size = len(self._pool.blocks(PinnedHolder(run)))
            if explained - size < used:
                break
            explained -= size
            self._unpin(run)
        now = self._clock.monotonic()
        for run in self._pinned:
            self._pool.renew(PinnedHolder(run), now + LEASES * self._timeout_s, now=now)
        self._track(max(0, used - explained))

    @property
    def pinned(self) -> int:
        """Handoffs that the engine may still keep."""
        self._forget_lapsed()
        return len(self._pinned)

    @property
    def overdue(self) -> bool:
        """A handoff is older than the engine should keep it."""
        self._forget_lapsed()
        oldest = next(iter(self._pinned.values()), None)
        return oldest is not None and self._clock.monotonic() - oldest > self._timeout_s

    def newly_overdue(self) -> int:
        """How many handoffs became older than the engine should keep them, since this was asked last."""
        self._look_for_late()
        count, self._newly_late = self._newly_late, 0
        return count

    # inside

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _reserved(self) -> int:
        """Blocks of the ledger that are promised, not used."""
        used = RunHolder | PinnedHolder | UntrackedHolder
        return sum(len(self._pool.blocks(holder)) for holder in self._pool.holders if not isinstance(holder, used))

    def _track(self, untracked: int) -> None:
        """Hold so many blocks in nobody's name, as far as there are any."""
        more = min(untracked - len(self._untracked), self._pool.available)
        if more > 0:
            self._pool.hold(_UNTRACKED, ())
            self._untracked += self._pool.extend(_UNTRACKED, more)
        elif more < 0:
            self._pool.give_back(_UNTRACKED, self._untracked[more:])
            del self._untracked[more:]

    def _look_for_late(self) -> None:
        oldest = self._clock.monotonic() - self._timeout_s
        late = {run for run, since in self._pinned.items() if since < oldest} - self._late
        self._late |= late
        self._newly_late += len(late)

    def _unpin(self, run: int) -> None:
        del self._pinned[run]
        self._late.discard(run)
        self._pool.release(PinnedHolder(run))

    def _forget_lapsed(self) -> None:
        """Their leases ran out in the ledger."""
        now = self._clock.monotonic()
        for run in [run for run in self._pinned if not self._pool.alive(PinnedHolder(run), now)]:
            self._unpin(run)
