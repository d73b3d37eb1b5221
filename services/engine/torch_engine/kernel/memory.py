"""The KV memory of a kernel worker: how many blocks, and their bytes as a `BlockPool`.

The layout inside a block is the kernel's (source/kernel.h). Must not know who holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.kernel.library import BLOCK_TOKENS, DType, Library
from services.engine.torch_engine.pool_size import Room, blocks_that_fit, swap_blocks
from services.kv import memory as kv_memory
from services.kv.pool import BlockPool
from services.kv.prefix import PrefixCache
from services.kv.swap import SwapSpace
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

LAYOUT = "block,layer,k:head,dim,token;v:head,token,dim%32"
DTYPE = DType.F16


@dataclass(frozen=True, slots=True)
class KernelMemory:
    """`content` are the bytes of `pool`."""

    content: NDArray[np.uint8]
    pool: BlockPool

    @property
    def tokens(self) -> int:
        return self.pool.total * BLOCK_TOKENS


def allocate(
    library: Library, config: LlamaConfig, settings: WorkerSettings, room: Room, prefix: PrefixCache | None
) -> KernelMemory:
    """Memory for as many blocks as the settings say or `room` allows, zeroed when it is first touched. Raises `SettingsError`."""
    block_bytes = library.block_bytes(config.layers, config.kv_heads, config.head_dim, DTYPE)
    blocks = blocks_that_fit(config, settings, block_bytes, room)
    swap = SwapSpace(swap_blocks(settings, blocks * block_bytes, block_bytes, room))
    try:
        memory = kv_memory.allocate(blocks * block_bytes)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"no memory for {blocks} KV blocks ({blocks * block_bytes // 2**20} MB): {error}") from None
    pool = BlockPool(blocks, block_bytes=block_bytes, memory=memory.view, fd=memory.fd, prefix=prefix, swap=swap)
    return KernelMemory(np.frombuffer(memory.view, np.uint8), pool)
