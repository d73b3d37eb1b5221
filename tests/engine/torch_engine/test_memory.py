"""The tensor and the pool are the same bytes; how many blocks there are."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from services.engine.torch_engine import memory
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.rope import Rope
from services.settings import SettingsError, WorkerSettings

CONFIG = LlamaConfig(257, 48, 96, 3, 6, 2, 8, 4096, Rope(1e4), 1e-5, False)
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def test_a_block_is_one_contiguous_region_of_the_pool() -> None:
    kv = memory.allocate(CONFIG, WorkerSettings(kv_blocks=256))
    assert tuple(kv.tensor.shape) == (256, 3, 2, 16, 2, 8)
    assert kv.tensor.is_contiguous()
    assert kv.pool.block_bytes == BLOCK_BYTES
    kv.tensor[7] = torch.arange(kv.tensor[7].numel()).view(kv.tensor[7].shape)
    assert torch.equal(torch.frombuffer(kv.pool.view(7), dtype=torch.float32), kv.tensor[7].flatten())
    kv.pool.view(8)[:] = kv.pool.view(7)
    assert torch.equal(kv.tensor[8], kv.tensor[7])
    assert kv.tensor[9].eq(0).all()


def test_blocks_from_megabytes() -> None:
    assert memory.allocate(CONFIG, WorkerSettings(kv_memory_mb=2)).pool.total == 2 * 2**20 // BLOCK_BYTES


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (WorkerSettings(kv_blocks=63), r"worker\.kv_blocks: room for 63 blocks.*at least 64 KV blocks"),
        (WorkerSettings(kv_memory_mb=1), r"worker\.kv_memory_mb: room for 42 blocks.*at least 64 KV blocks, 2 MB"),
    ],
)
def test_too_little_memory_is_refused_with_what_is_needed(settings: WorkerSettings, message: str) -> None:
    config = replace(CONFIG, layers=12) if settings.kv_blocks == 0 else CONFIG
    with pytest.raises(SettingsError, match=message):
        memory.allocate(config, settings)


def test_less_than_a_whole_context_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert memory.allocate(CONFIG, WorkerSettings(kv_blocks=64)).tokens == 1024
    assert "1024 of the model's 4096 tokens" in caplog.text


def test_a_short_context_needs_few_blocks() -> None:
    assert memory.allocate(replace(CONFIG, context=32), WorkerSettings(kv_blocks=2)).tokens == 32
