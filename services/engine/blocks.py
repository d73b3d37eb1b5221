"""How a sequence gets its KV blocks, and when they become everybody's.

Owns: hits at admission, growth, branching with copy on write, sealing. Must not know: steps' outcomes, runners, schedulers.
Invariant: a block is sealed once the step that filled it is over, and never written from then on; what a step writes, one
sequence holds alone.
"""

from __future__ import annotations

from services.engine.protocol import EngineInfo
from services.engine.scheduler import Chunk
from services.engine.sequence import TRUNK, Sequence
from services.kv.hashing import block_hashes, cap_hit, chain_root
from services.kv.ledger import LedgerError
from services.kv.pool import BlockPool


class SequenceBlocks:
    """The blocks of one engine's sequences, each held by its `holder` in `pool`. Called between steps only."""

    def __init__(self, info: EngineInfo, pool: BlockPool) -> None:
        self._info = info
        self._pool = pool

    def needed(self, tokens: int) -> int:
        """Blocks for `tokens` tokens."""
        return -(-tokens // self._info.block_tokens)

    def wanted(self, sequence: Sequence) -> int:
        """Blocks with which its next step can run; of a trunk, the first step of its choices too."""
        ahead = len(sequence.spec.choices) if sequence.choice == TRUNK and sequence.then_decode else 0
        return self.needed(len(sequence.ids)) + ahead

    def admit(self, sequence: Sequence) -> None:
        """Give a new sequence its blocks, after those it can take from the prefix cache, which count as computed.

        Blocks that its run holds already (a reservation) are used; one more for each choice that decodes here. Raises
        PoolExhausted; then nothing was changed.
        """
        sequence.hashes = self._identities(sequence)
        hit = self._match(sequence)
        sequence.blocks = self._pool.claim(sequence.holder, self._room(sequence), hit)
        sequence.sealed = len(hit)
        sequence.computed = sequence.reused = len(hit) * self._info.block_tokens
        sequence.totals.cached_tokens = min(sequence.reused, sequence.prompt_length)

    def adopt(self, sequence: Sequence) -> None:
        """The blocks that its run holds contain all its ids. Raises LedgerError when they cannot."""
        sequence.blocks = self._pool.blocks(sequence.holder)
        if len(sequence.blocks) < self.needed(len(sequence.ids)):
            raise LedgerError(f"a run of {len(sequence.ids)} computed tokens came with {len(sequence.blocks)} blocks")
        sequence.computed = len(sequence.ids)
        self.seal(sequence)

    def may_lack(self, sequence: Sequence) -> bool:
        """Whether `grow` may have something to do: mostly it has not, and this is asked before each step."""
        is_full = len(sequence.ids) > len(sequence.blocks) * self._info.block_tokens
        return is_full or len(sequence.spec.choices) > 1

    def grow(self, sequence: Sequence) -> None:
        """Make room for all of the sequence's ids; what it writes next is its own. Raises PoolExhausted."""
        self._own_tail(sequence)
        missing = self.wanted(sequence) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += tuple(self._pool.extend(sequence.holder, missing))

    def reach(self, sequence: Sequence, beyond: int) -> int:
        """How many tokens after its ids, up to `beyond`, its blocks hold. More are taken only where nobody uses them."""
        missing = self.needed(len(sequence.ids) + beyond) - len(sequence.blocks)
        if 0 < missing <= min(self._pool.free, self._pool.available):
            sequence.blocks += tuple(self._pool.extend(sequence.holder, missing))
        return max(0, min(beyond, len(sequence.blocks) * self._info.block_tokens - len(sequence.ids)))

    def branch(self, trunk: Sequence, branches: list[Sequence]) -> None:
        """Each of `branches` takes a share in the blocks that `trunk` has filled, and some of those it has beyond."""
        filled = self.needed(trunk.computed)
        for position, branch in enumerate(branches):
            branch.blocks = (*trunk.blocks[:filled], *trunk.blocks[filled + position :: len(branches)])
            branch.sealed, branch.hashes = trunk.sealed, list(trunk.hashes)
            self._pool.hold(branch.holder, branch.blocks)
        self._pool.release(trunk.holder)

    def filled(self, sequence: Sequence) -> None:
        """A step has computed more of it: seal what became full, with the checksums that readers elsewhere compare."""
        before = sequence.sealed
        if sequence.computed // self._info.block_tokens == before:
            return
        self.seal(sequence)
        self._pool.attest(sequence.blocks[before : sequence.sealed])

    def seal(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full by now. A block may be exchanged for an older one of the same content."""
        first, end = sequence.sealed, sequence.computed // self._info.block_tokens
        if first == end:
            return
        if len(sequence.hashes) < end:
            sequence.hashes = self._identities(sequence)
        full = sequence.blocks[first:end]
        kept = tuple(self._pool.seal(sequence.holder, full, sequence.hashes[first:end]))
        if kept != full:
            sequence.blocks = (*sequence.blocks[:first], *kept, *sequence.blocks[end:])
        sequence.sealed = end

    def must_be_writable(self, chunk: Chunk) -> None:
        """Raises LedgerError when the chunk would write into a block that is shared or sealed: a bug of ours."""
        tokens = self._info.block_tokens
        written = chunk.sequence.blocks[chunk.start // tokens : -(-(chunk.start + chunk.count) // tokens)]
        shared = [block for block in written if not self._pool.writable(block)]
        if shared:
            raise LedgerError(f"run {chunk.sequence.run} would write into shared blocks {shared}")

    def _room(self, sequence: Sequence) -> int:
        """Blocks for its ids and, when it decodes here, for what it or each of its choices writes first."""
        if sequence.choice == TRUNK or not sequence.then_decode:
            return self.wanted(sequence)
        return self.needed(len(sequence.ids) + 1)

    def _own_tail(self, sequence: Sequence) -> None:
        """A block that is partly filled and shared with other choices is copied; the last of them keeps it."""
        at, filled = divmod(sequence.computed, self._info.block_tokens)
        if not sequence.branched or not filled or self._pool.writable(sequence.blocks[at]):
            return
        shared = sequence.blocks[at]
        own, *beyond = sequence.blocks[at + 1 :] or self._pool.extend(sequence.holder, 1)
        self._pool.copy(shared, own)
        self._pool.give_back(sequence.holder, [shared])
        sequence.blocks = (*sequence.blocks[:at], own, *beyond)

    def _match(self, sequence: Sequence) -> list[int]:
        if sequence.sampling.prompt_logprobs is not None:
            return []  # they come from computing every token of the prompt
        most = cap_hit(len(sequence.ids), self._info.block_tokens)
        return self._pool.prefix.match(sequence.hashes[:most])

    def _identities(self, sequence: Sequence) -> list[bytes]:
        spec = sequence.spec
        root = chain_root(self._info.kv_compat, spec.salt, spec.adapter)
        return block_hashes(sequence.ids, self._info.block_tokens, root, sequence.hashes)
