"""One worker's pool of KV blocks: the ledger, views into the memory that was passed in, and the swap space beside it.

Owns: where a block's bytes lie, and their checksums; a pool whose memory is not this host's overrides `copy`, `read` and `write`.
Must not know: what the bytes mean, who made the memory (torch, a memfd, a
bytearray). Invariant: the bytes of a block do not change between its checksum and its next generation.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from services.kv.holders import Holder
from services.kv.ledger import BlockLedger, LedgerError, PoolExhausted
from services.kv.prefix import PrefixCache
from services.kv.swap import SwapSpace

__all__ = ["BlockPool", "LedgerError", "PoolExhausted"]


class BlockPool(BlockLedger):
    """`blocks` blocks of `block_bytes` bytes each, in `memory`: block i is bytes i*block_bytes up to (i+1)*block_bytes.

    Without `memory` the pool only accounts, and `view` and `checksum` raise LedgerError. `fd` names the same memory
    (`PoolMemory`), for readers on this host.
    """

    def __init__(
        self,
        blocks: int,
        *,
        block_bytes: int = 0,
        memory: memoryview | None = None,
        fd: int | None = None,
        prefix: PrefixCache | None = None,
        swap: SwapSpace | None = None,
    ) -> None:
        super().__init__(blocks, prefix=prefix)
        if memory is not None and memory.nbytes != blocks * block_bytes:
            raise LedgerError(f"{blocks} blocks of {block_bytes} bytes do not fill a memory of {memory.nbytes}")
        self.block_bytes = block_bytes
        self.fd = fd
        self.swap = SwapSpace() if swap is None else swap
        self._memory = None if memory is None else memory.cast("B")
        self._checksums: dict[int, tuple[int, int]] = {}  # block: (generation, digest)

    @property
    def memory(self) -> memoryview:
        """The bytes of all blocks. Raises LedgerError without memory."""
        if self._memory is None:
            raise LedgerError("this pool only accounts; it has no memory")
        return self._memory

    def view(self, block: int) -> memoryview:
        """The `block_bytes` bytes of `block`, writable if the memory is. Raises LedgerError without memory."""
        if not 0 <= block < self.total:
            raise LedgerError(f"block {block} is outside 0..{self.total - 1}")
        return self.memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def copy(self, source: int, target: int) -> None:
        """The bytes of one block into another. A pool that only accounts has none to copy."""
        if self._memory is not None:
            self.view(target)[:] = self.view(source)

    def read(self, block: int) -> bytes:
        """A copy of the block's bytes. A pool that only accounts has none."""
        return b"" if self._memory is None else bytes(self.view(block))

    def write(self, block: int, content: bytes) -> None:
        """What `read` gave, into a block that its holder has alone."""
        if self._memory is not None:
            self.view(block)[:] = content

    def release(self, holder: Holder) -> None:
        """Also what the holder has in the swap space."""
        self.vacate(holder)
        self.swap.drop(holder)

    def vacate(self, holder: Holder) -> None:
        """The holder's blocks are released; what it has in the swap space stays."""
        super().release(holder)

    async def stage_out(self, blocks: Sequence[int]) -> None:
        """Full blocks that somebody holds are what `view` shows, for readers elsewhere. Nothing to do in memory of the host."""

    async def stage_in(self, blocks: Sequence[int]) -> None:
        """What `view` shows of these blocks, which came from elsewhere, is what the engine computes on. As above."""

    def attest(self, blocks: Sequence[int]) -> None:
        """These blocks were just filled: take their checksums, so that no later change gets past a reader."""
        for block in blocks if self._memory is not None else ():
            self.checksum(block)

    def has_checksum(self, block: int) -> bool:
        """It was taken in this generation."""
        return self._checksums.get(block, (-1, 0))[0] == self.generation(block)

    def checksum(self, block: int) -> int:
        """xxh3_64 of the block, taken once a generation: from then on nobody writes it until it is given out anew."""
        generation, digest = self._checksums.get(block, (-1, 0))
        if generation != self.generation(block):
            digest = xxhash.xxh3_64_intdigest(self.view(block))
            self._checksums[block] = (self.generation(block), digest)
        return digest

    def check_integrity(self) -> None:
        super().check_integrity()
        if problems := self.swap.problems():
            raise LedgerError("; ".join(problems))
