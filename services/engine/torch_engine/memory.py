"""The KV memory of one worker: one tensor for the model, and a `BlockPool` of the same blocks for everybody else.

Owns its layout: block, layer, K then V, token, KV head, element; so a block is one contiguous region, which is what moves in a
handoff. Must not know who holds a block. Invariant: the tensor and the pool's memory are the same bytes, or the pool knows how to
make them so (`StagedPool`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.engine.host import available_memory
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.device import CPU, Place
from services.engine.torch_engine.pool_size import BLOCK_TOKENS, Room, blocks_that_fit, swap_blocks
from services.engine.torch_engine.staged import StagedPool
from services.kv import memory as kv_memory
from services.kv.pool import BlockPool
from services.kv.prefix import PrefixCache
from services.kv.swap import SwapSpace
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

LAYOUT = "block,layer,kv,token,head,dim"
_MB = 2**20


@dataclass(frozen=True, slots=True)
class KVMemory:
    """`tensor` [blocks, layers, 2, 16, kv_heads, head_dim] over the memory of `pool`, or beside it on a device."""

    tensor: Tensor
    pool: BlockPool

    @property
    def tokens(self) -> int:
        return self.pool.total * BLOCK_TOKENS


def allocate(
    config: LlamaConfig, settings: WorkerSettings, room: Room, prefix: PrefixCache | None = None, place: Place = CPU
) -> KVMemory:
    """Memory for as many blocks as the settings say or `room` allows, zeroed when it is first touched. Raises `SettingsError`."""
    shape = (config.layers, 2, BLOCK_TOKENS, config.kv_heads, config.head_dim)
    block_bytes = place.dtype.itemsize
    for extent in shape:
        block_bytes *= extent
    blocks = blocks_that_fit(config, settings, block_bytes, room)
    host = Room(available_memory()) if place.staged else room
    swap = SwapSpace(swap_blocks(settings, blocks * block_bytes, block_bytes, host))
    try:
        memory = kv_memory.allocate(blocks * block_bytes)
    except (OSError, OverflowError) as error:
        raise SettingsError(f"no memory for {blocks} KV blocks ({blocks * block_bytes // _MB} MB): {error}") from None
    options: dict[str, Any] = {
        "block_bytes": block_bytes,
        "memory": memory.view,
        "fd": memory.fd,
        "prefix": prefix,
        "swap": swap,
    }
    if place.staged:
        tensor = torch.zeros((blocks, *shape), dtype=place.dtype, device=place.device)
        return KVMemory(tensor, StagedPool(tensor, **options))
    tensor = torch.frombuffer(memory.view, dtype=place.dtype).view(blocks, *shape)
    return KVMemory(tensor, BlockPool(blocks, **options))
