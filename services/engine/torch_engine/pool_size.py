"""How many KV blocks a worker has: from the settings, checked against what the model needs. Pure."""

from __future__ import annotations

import logging

from services.engine.torch_engine.config import LlamaConfig
from services.settings import SettingsError, WorkerSettings

BLOCK_TOKENS = 16
_FEWEST_BLOCKS = 64
_MB = 2**20

_log = logging.getLogger(__name__)


def blocks_that_fit(config: LlamaConfig, settings: WorkerSettings, block_bytes: int) -> int:
    """Too few for one whole context is allowed, down to 64 blocks, and shortens what the engine promises.

    Raises `SettingsError` below that.
    """
    blocks = settings.kv_blocks or settings.kv_memory_mb * _MB // block_bytes
    whole = -(-config.context // BLOCK_TOKENS)
    fewest = min(whole, _FEWEST_BLOCKS)
    if blocks < fewest:
        key = "kv_blocks" if settings.kv_blocks else "kv_memory_mb"
        needed = f"{fewest} KV blocks, {-(-fewest * block_bytes // _MB)} MB"
        raise SettingsError(f"worker.{key}: room for {blocks} blocks of {block_bytes} bytes; this model needs at least {needed}")
    if blocks < whole:
        _log.warning("%d KV blocks hold %d of the model's %d tokens of context", blocks, blocks * BLOCK_TOKENS, config.context)
    return blocks
