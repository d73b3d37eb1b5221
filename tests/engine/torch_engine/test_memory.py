"""The tensor and the pool are the same bytes; how many blocks there are."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from services.engine.torch_engine import memory
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.pool_size import Room, blocks_that_fit, swap_blocks
from services.engine.torch_engine.rope import Rope
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings

CONFIG = LlamaConfig(257, 48, 96, 3, 6, 2, 8, 4096, Rope(1e4), 1e-5, False)
ROOM = Room(2**30)
MB = 2**20
BLOCK_BYTES = 3 * 2 * 16 * 2 * 8 * 4


def test_a_block_is_one_contiguous_region_of_the_pool() -> None:
    kv = memory.allocate(CONFIG, WorkerSettings(kv_blocks=256), ROOM)
    assert tuple(kv.tensor.shape) == (256, 3, 2, 16, 2, 8)
    assert kv.tensor.is_contiguous()
    assert kv.pool.block_bytes == BLOCK_BYTES
    kv.tensor[7] = torch.arange(kv.tensor[7].numel()).view(kv.tensor[7].shape)
    assert torch.equal(torch.frombuffer(kv.pool.view(7), dtype=torch.float32), kv.tensor[7].flatten())
    kv.pool.view(8)[:] = kv.pool.view(7)
    assert torch.equal(kv.tensor[8], kv.tensor[7])
    assert kv.tensor[9].eq(0).all()


def test_blocks_from_megabytes() -> None:
    assert memory.allocate(CONFIG, WorkerSettings(kv_memory_mb=2), ROOM).pool.total == 2 * 2**20 // BLOCK_BYTES


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
        memory.allocate(config, settings, ROOM)


def test_less_than_a_whole_context_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert memory.allocate(CONFIG, WorkerSettings(kv_blocks=64), ROOM).tokens == 1024
    assert "1024 of the model's 4096 tokens" in caplog.text


def test_a_short_context_needs_few_blocks() -> None:
    assert memory.allocate(replace(CONFIG, context=32), WorkerSettings(kv_blocks=2), ROOM).tokens == 32


def pool(settings: WorkerSettings, room: Room) -> int:
    """Bytes."""
    return memory.allocate(CONFIG, settings, room).pool.total * BLOCK_BYTES


def test_without_a_setting_half_of_what_is_free_is_shared_among_the_machine_s_workers() -> None:
    assert pool(WorkerSettings(), Room(100 * MB)) == 50 * MB // BLOCK_BYTES * BLOCK_BYTES
    assert pool(WorkerSettings(machine_workers=4), Room(100 * MB)) == 12.5 * MB // BLOCK_BYTES * BLOCK_BYTES
    beside_weights = Room(100 * MB, shared=20 * MB, own=10 * MB)
    assert pool(WorkerSettings(machine_workers=2), beside_weights) == 15 * MB // BLOCK_BYTES * BLOCK_BYTES


def test_without_a_setting_a_large_machine_is_not_taken_over() -> None:
    assert blocks_that_fit(CONFIG, WorkerSettings(), 2**20, Room(2**40)) == 2048


@pytest.mark.parametrize(
    ("settings", "room", "message"),
    [
        (WorkerSettings(), Room(MB // 2), "not enough memory.* 1 MB are free for each of 1 workers.* 64 KV blocks, 1 MB"),
        (WorkerSettings(machine_workers=2), Room(100 * MB, shared=200 * MB), " 0 MB are free for each of 2 workers"),
        (
            WorkerSettings(kv_memory_mb=64),
            Room(100 * MB, shared=30 * MB, own=10 * MB),
            r"kv_memory_mb: .* 64 MB.* 60 MB are free",
        ),
        (WorkerSettings(kv_blocks=20_000), Room(100 * MB), r"kv_blocks: 20000 KV blocks take 118 MB.* 100 MB are free"),
    ],
)
def test_what_does_not_fit_the_machine_is_refused_in_one_line(settings: WorkerSettings, room: Room, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        memory.allocate(CONFIG, settings, room)
    assert "\n" not in str(refused.value)


def test_a_worker_that_starts_again_gets_the_pool_it_asks_for() -> None:
    """Its neighbour's pool is in use by then: what is free is its own half."""
    assert pool(WorkerSettings(machine_workers=2, kv_memory_mb=40), Room(50 * MB)) > 39 * MB


@pytest.mark.parametrize(
    ("settings", "left", "mb"),
    [
        (WorkerSettings(), 100, 10),  # a quarter of the pool
        (WorkerSettings(), 20, 5),  # or of what is free beside it
        (WorkerSettings(machine_workers=2), 60, 2),  # (40 + 60) / 2 - 40 = 10 are this worker's
        (WorkerSettings(), -1, 0),
        (WorkerSettings(kv_swap_mb=0), 100, 0),
        (WorkerSettings(kv_swap_mb=99), 100, 99),
    ],
)
def test_the_swap_space_is_modest_unless_it_is_asked_for(settings: WorkerSettings, left: int, mb: int) -> None:
    assert swap_blocks(settings, 40 * MB, MB, Room((40 + left) * MB)) == mb


def test_a_swap_space_larger_than_what_is_free_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"kv_swap_mb: 101 MB; beside the weights and the KV pool 100 MB are free"):
        swap_blocks(WorkerSettings(kv_swap_mb=101), 40 * MB, MB, Room(140 * MB))
    kv = memory.allocate(CONFIG, WorkerSettings(kv_memory_mb=2, kv_swap_mb=1), ROOM)
    assert kv.pool.swap.total == MB // BLOCK_BYTES


def test_a_large_pool_has_a_swap_space_of_at_most_512_mb() -> None:
    assert swap_blocks(WorkerSettings(), 2**40, MB, Room(2**42)) == 512
