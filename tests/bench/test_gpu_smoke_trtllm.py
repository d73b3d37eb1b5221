"""TensorRT-LLM's checks for a GPU, on its double: they pass on what is as recorded, and fail on what is not."""

from __future__ import annotations

import pytest

from bench.gpu_smoke_trtllm import smoke
from schemas.state import Role
from tests.engine.trtllm_engine.double import World
from tests.engine.trtllm_engine.rig import build

pytestmark = pytest.mark.slow


async def run(world: World) -> int:
    return await smoke(lambda role: build(world, Role(role), 1.0), 1.0, length=24, count=8)


async def test_an_engine_as_recorded_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code = await run(World(blocks=400, step_s=0.002))
    said = capsys.readouterr().out
    assert code == 0, said
    for row in ("statistics", "kv events", "a seed repeats", "penalties", "greedy", "cancel during", "orphan", "tokens/s"):
        assert row in said


async def test_an_orphan_that_is_never_freed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(World(blocks=400, step_s=0.002, leak=True)) == 1
    assert "FAILED" in capsys.readouterr().out
