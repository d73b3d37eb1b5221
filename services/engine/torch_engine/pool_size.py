"""How many KV blocks a worker has, and how many its swap space: from the settings or from the memory there is. Pure.

Checked against what the model needs and what the machine has.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from services.engine.torch_engine.config import LlamaConfig
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

BLOCK_TOKENS = 16
_FEWEST_BLOCKS = 64
_MB = 2**20
_SWAP_FRACTION = 0.25
"""Of the pool, and of what is free beside it."""
_MOST_AUTOMATIC_SWAP = 512 * _MB

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes `available` to all workers of this machine. Weights: `shared` by all in one copy, or each one's `own`.

    Without a setting a pool takes `fraction` of what is left, at most `most`: the rest is for working memory, the page cache and
    everybody else.
    """

    available: int
    shared: int = 0
    own: int = 0
    fraction: float = 0.5
    most: int = 2048 * _MB

    def share(self, workers: int) -> int:
        """What is left to one of `workers` that start together."""
        return max(0, (self.available - self.shared) // workers - self.own)


def blocks_that_fit(config: LlamaConfig, settings: WorkerSettings, block_bytes: int, room: Room) -> int:
    """Too few for one whole context is allowed, down to 64 blocks, and shortens what the engine promises.

    Raises `SettingsError` below that, and for a setting that asks for more than there is.
    """
    whole = -(-config.context // BLOCK_TOKENS)
    fewest = min(whole, _FEWEST_BLOCKS)
    if settings.kv_blocks or settings.kv_memory_mb:
        blocks = _asked(settings, fewest, block_bytes, room)
    else:
        blocks = _automatic(settings, fewest, block_bytes, room)
    if blocks < whole:
        _log.warning("%d KV blocks hold %d of the model's %d tokens of context", blocks, blocks * BLOCK_TOKENS, config.context)
    return blocks


def swap_blocks(settings: WorkerSettings, pool_bytes: int, block_bytes: int, room: Room) -> int:
    """How many blocks of preempted runs are kept beside a pool of `pool_bytes`. Memory is taken when runs are preempted.

    Raises `SettingsError` for a setting that asks for more than there is.
    """
    if settings.kv_swap_mb is None:
        left = max(0, room.share(settings.machine_workers) - pool_bytes)
        return min(int(min(pool_bytes, left) * _SWAP_FRACTION), _MOST_AUTOMATIC_SWAP) // block_bytes
    size = settings.kv_swap_mb * _MB
    if size > (left := max(0, room.share(1) - pool_bytes)):
        raise SettingsError(f"worker.kv_swap_mb: {_mb(size)}; beside the weights and the KV pool {_mb(left)} are free")
    return size // block_bytes


def _asked(settings: WorkerSettings, fewest: int, block_bytes: int, room: Room) -> int:
    """A worker that starts again beside others, whose memory is in use by then, gets what it asks for: the whole rest is its."""
    key = "kv_blocks" if settings.kv_blocks else "kv_memory_mb"
    blocks = settings.kv_blocks or settings.kv_memory_mb * _MB // block_bytes
    if blocks < fewest:
        raise SettingsError(
            f"worker.{key}: room for {blocks} blocks of {block_bytes} bytes; "
            f"this model needs at least {_needs(fewest, block_bytes)}"
        )
    if blocks * block_bytes > room.share(1):
        raise SettingsError(
            f"worker.{key}: {blocks} KV blocks take {_mb(blocks * block_bytes)}; beside the weights {_mb(room.share(1))} are free"
        )
    return blocks


def _automatic(settings: WorkerSettings, fewest: int, block_bytes: int, room: Room) -> int:
    share = room.share(settings.machine_workers)
    blocks = min(int(share * room.fraction), room.most) // block_bytes
    if blocks < fewest:
        raise SettingsError(
            f"not enough memory: beside the weights {_mb(share)} are free for each of {settings.machine_workers} workers; "
            f"{room.fraction:.0%} of it must hold {_needs(fewest, block_bytes)} (or set worker.kv_memory_mb)"
        )
    return blocks


def _needs(blocks: int, block_bytes: int) -> str:
    return f"{blocks} KV blocks, {_mb(blocks * block_bytes)}"


def _mb(size: int) -> str:
    return f"{-(-size // _MB)} MB"
