"""How a sequence gets its KV blocks, and when they become everybody's.

Owns: hits at admission, growth, sealing. Must not know: steps' outcomes, runners, schedulers. Invariant: a block is sealed once
the step that filled it is over, and never written from then on; what a step writes, one run holds alone.
"""

from __future__ import annotations

from services.engine.protocol import EngineInfo
from services.engine.scheduler import Chunk
from services.engine.sequence import Sequence
from services.kv.hashing import block_hashes, cap_hit, chain_root
from services.kv.holders import RunHolder
from services.kv.ledger import BlockLedger, LedgerError


class SequenceBlocks:
    """The blocks of one engine's sequences, each held by its run in `pool`. Called between steps only."""

    def __init__(self, info: EngineInfo, pool: BlockLedger) -> None:
        self._info = info
        self._pool = pool

    def needed(self, tokens: int) -> int:
        """Blocks for `tokens` tokens."""
        return -(-tokens // self._info.block_tokens)

    def admit(self, sequence: Sequence) -> None:
        """Give a new sequence its blocks, after those it can take from the prefix cache, which count as computed.

        Blocks that its run holds already (a reservation) are used. Raises PoolExhausted; then nothing was changed.
        """
        sequence.hashes = self._identities(sequence)
        hit = self._match(sequence)
        room = len(sequence.ids) + (1 if sequence.then_decode else 0)
        sequence.blocks = self._pool.claim(RunHolder(sequence.run), self.needed(room), hit)
        sequence.sealed = len(hit)
        sequence.computed = sequence.reused = len(hit) * self._info.block_tokens
        sequence.cached_tokens = min(sequence.reused, sequence.prompt_length)

    def grow(self, sequence: Sequence) -> None:
        """Make room for the sequence's last token. Raises PoolExhausted."""
        missing = self.needed(len(sequence.ids)) - len(sequence.blocks)
        if missing > 0:
            sequence.blocks += tuple(self._pool.extend(RunHolder(sequence.run), missing))

    def seal(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full by now. A block may be exchanged for an older one of the same content."""
        first, end = sequence.sealed, sequence.computed // self._info.block_tokens
        if first == end:
            return
        if len(sequence.hashes) < end:
            sequence.hashes = self._identities(sequence)
        full = sequence.blocks[first:end]
        kept = tuple(self._pool.seal(RunHolder(sequence.run), full, sequence.hashes[first:end]))
        if kept != full:
            sequence.blocks = (*sequence.blocks[:first], *kept, *sequence.blocks[end:])
        sequence.sealed = end

    def must_be_writable(self, chunk: Chunk) -> None:
        """Raises LedgerError when the chunk would write into a block that is shared or sealed: a bug of ours."""
        first, end = chunk.start // self._info.block_tokens, self.needed(chunk.start + chunk.count)
        shared = [block for block in chunk.sequence.blocks[first:end] if not self._pool.writable(block)]
        if shared:
            raise LedgerError(f"run {chunk.sequence.run} would write into shared blocks {shared}")

    def _match(self, sequence: Sequence) -> list[int]:
        if sequence.sampling.prompt_logprobs is not None:
            return []  # they come from computing every token of the prompt
        most = cap_hit(len(sequence.ids), self._info.block_tokens)
        return self._pool.prefix.match(sequence.hashes[:most])

    def _identities(self, sequence: Sequence) -> list[bytes]:
        spec = sequence.spec
        root = chain_root(self._info.kv_compat, spec.salt, spec.adapter)
        return block_hashes(sequence.ids, self._info.block_tokens, root, sequence.hashes)
