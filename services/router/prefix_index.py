"""Which worker has which KV blocks: one map from block identities to the set of their holders.

Owns: the map. Must not know: who says what is stored, hashing, tokens, time beyond what is passed in. Invariant: a process that
was forgotten has no hits, and no other process inherits its blocks. It is an estimate: a wrong hit costs time, never correctness.

A set of holders is an integer, one bit a process, so a look-up follows a prompt's chain once, however many workers there are.
Processes are forgotten at once (their bit counts no more) and cleared out later, a part of the map at a time, before the bit is
given out again. The map is cut into parts so that neither clearing nor growth stops the event loop for long.

Memory, measured on CPython 3.11 (`python -m bench.router_decision --memory`): see docs/routing.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

SHARDS = 256
"""By the first byte of an identity."""
EXPECT_S = 10.0
"""How long a block counts as stored before its worker says so: longer than most prompts wait and compute."""
MAX_EXPECTED = 2**18
"""Most blocks that are expected at once; beyond it the oldest are not."""
MAX_MASKS = 2**16
MAX_NAMED = 2**10


class PrefixIndex:
    """Identities are 16 bytes; holders are process ids. Nothing raises."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self._bits: dict[str, int] = {}
        self._names: list[str] = []
        self._live = 0
        self._free: list[int] = []
        self._retired = 0
        self._clearing = 0
        self._position = 0
        self._masks: dict[int, int] = {}  # equal sets of holders are one object
        self._named: dict[int, tuple[str, ...]] = {}  # who a set of holders is, of those that were asked for lately
        self._expected: dict[bytes, int] = {}
        self._expectations: deque[tuple[float, int, tuple[bytes, ...]]] = deque()
        self._expected_names = 0

    def __len__(self) -> int:
        """Blocks, each counted once."""
        return sum(map(len, self._shards))

    # what workers say

    def stored(self, process: str, blocks: Iterable[bytes]) -> None:
        bit, shards, share = self._bit(process), self._shards, self._masks.setdefault
        for name in blocks:
            shard = shards[name[0]]
            mask = shard.get(name, 0) | bit
            shard[name] = share(mask, mask)

    def removed(self, process: str, blocks: Iterable[bytes]) -> int:
        """How many of `blocks` it did not have here: more than 0 says that this index and the worker disagree."""
        bit, unknown = self._bit(process), 0
        for name in blocks:
            shard = self._shards[name[0]]
            mask = shard.get(name, 0)
            if not mask & bit:
                unknown += 1
            elif mask == bit:
                del shard[name]
            else:
                mask ^= bit
                shard[name] = self._masks.setdefault(mask, mask)
        return unknown

    def forget(self, process: str) -> None:
        """It has nothing, as far as we know."""
        position = self._bits.pop(process, None)
        if position is not None:
            self._live &= ~(1 << position)
            self._retired |= 1 << position

    # what routers do

    def expect(self, process: str, blocks: Iterable[bytes], now: float) -> None:
        """`process` was given work that stores `blocks`."""
        self.expire(now)
        bit, names, share = self._bit(process), tuple(blocks), self._masks.setdefault
        for name in names:
            mask = self._expected.get(name, 0) | bit
            self._expected[name] = share(mask, mask)
        self._expectations.append((now + EXPECT_S, bit, names))
        self._expected_names += len(names)

    def expire(self, now: float) -> None:
        """What is expected no longer."""
        waiting = self._expectations
        while waiting and (waiting[0][0] <= now or self._expected_names > MAX_EXPECTED):
            _, bit, names = waiting.popleft()
            self._expected_names -= len(names)
            for name in names:
                mask = self._expected.get(name, 0) & ~bit
                if mask:
                    self._expected[name] = mask
                else:
                    self._expected.pop(name, None)

    def hits(self, chain: Iterable[bytes]) -> dict[str, int]:
        """For each process that has the beginning of `chain`: how many blocks of it. Stops where nobody has more."""
        alive, found, depth = self._live, dict[str, int](), 0
        shards, expected = self._shards, self._expected
        before = hoped_before = -1
        for name in chain:
            mask, hoped = shards[name[0]].get(name, 0), expected.get(name, 0)
            if mask is not before or hoped is not hoped_before:  # mostly they are: equal sets are one object
                before, hoped_before = mask, hoped
                still = alive & (mask | hoped)
                if still != alive:
                    if depth:
                        found = self._noted(found, alive & ~still, depth)
                    if not still:
                        return found
                    alive = still
            depth += 1
        return self._noted(found, alive, depth) if depth else found

    # clearing

    def clear_some(self) -> None:
        """Clears one part of the map of the forgotten. Call it often: each bit is free again after at most two rounds."""
        if self._position == 0:
            if len(self._masks) > MAX_MASKS:
                self._masks = {}
            if not self._clearing:
                self._clearing, self._retired = self._retired, 0
            if not self._clearing:
                return
        shard, gone = self._shards[self._position], self._clearing
        for name, mask in [(name, mask) for name, mask in shard.items() if mask & gone]:
            left = mask & ~gone
            if left:
                shard[name] = self._masks.setdefault(left, left)
            else:
                del shard[name]
        self._position = (self._position + 1) % SHARDS
        if self._position == 0:
            self._expected = {name: mask & ~gone for name, mask in self._expected.items() if mask & ~gone}
            self._expectations = deque(item for item in self._expectations if not item[1] & gone)
            self._expected_names = sum(len(names) for _, _, names in self._expectations)
            self._free.extend(_positions(gone))
            self._clearing = 0

    # inside

    def _bit(self, process: str) -> int:
        position = self._bits.get(process)
        if position is None:
            if self._free:
                position = self._free.pop()
                self._names[position] = process
                self._named = {}
            else:
                position = len(self._names)
                self._names.append(process)
            self._bits[process] = position
            self._live |= 1 << position
        return 1 << position

    def _noted(self, found: dict[str, int], mask: int, depth: int) -> dict[str, int]:
        names = self._named.get(mask)
        if names is None:
            if len(self._named) >= MAX_NAMED:
                self._named = {}
            names = self._named[mask] = tuple(self._names[position] for position in _positions(mask))
        new = dict.fromkeys(names, depth)
        return found | new if found else new


def _positions(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
