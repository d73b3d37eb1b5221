"""Random admissions, aborts, preemptions, swaps, cache hits, handoffs and resumes change no bit of any logits.

A failing seed is part of the test's name: `pytest "tests/engine/kernel/test_storm.py::test_a_storm[7]"` says it again.
"""

from __future__ import annotations

from random import Random

import pytest

from schemas.lifecycle import State
from services.clock import ManualClock
from services.engine.torch_engine.build import build
from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.library import Library
from services.models.store import ModelFiles
from services.settings.worker import WorkerSettings
from tests.engine.kernel.conftest import CACHE
from tests.engine.kernel.rig import Machine, tensors_in
from tests.engine.kernel.storm import Storm
from tests.engine.torch_engine import tiny


def prompts(vocab: int, longest: int) -> list[list[int]]:
    """Beginnings that many prompts share."""
    random = Random(1)
    return [[random.randrange(3, vocab) for _ in range(random.randint(1, longest))] for _ in range(6)]


def storm(seed: int, files: ModelFiles, library: Library, *, longest: int) -> Storm:
    """A pool that holds a few of the runs, and a swap space of any size. The clock stands still, so chunks are the smallest."""
    random = Random(seed)
    config = load_config(files.config)
    started = prompts(config.vocab, longest)
    settings = WorkerSettings(
        kv_blocks=max(18, min(64, config.context // 16)),
        threads=random.choice((1, 2)),
        max_batch=6,
        step_tokens=random.choice((16, 48)),
        prefix_cache=random.random() < 0.8,
        speculative_tokens=random.choice((0, 3)),
    )
    engines = [build(files, settings, ManualClock(), kernels=CACHE) for _ in range(2)]
    for engine in engines:
        engine.pool.swap.total = random.choice((0, 6, 100))

    def prompt(random: Random) -> list[int]:
        return [*random.choice(started), *(random.randrange(3, config.vocab) for _ in range(random.randint(0, 9)))]

    alone = Machine(library, config, tensors_in(files.folder))
    return Storm(seed, *engines, alone, prompt, longest)


async def weather(seed: int, files: ModelFiles, library: Library, *, actions: int, longest: int) -> dict[str, int]:
    made = storm(seed, files, library, longest=longest)
    await made.run(actions)
    return made.counts


@pytest.mark.parametrize("seed", range(4))
async def test_a_storm(library: Library, half_gqa: tiny.Tiny, seed: int) -> None:
    counts = await weather(seed, half_gqa.files, library, actions=300, longest=50)
    assert counts["rows"] > 150


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(100, 110))
async def test_ten_thousand_actions(library: Library, half_gqa: tiny.Tiny, seed: int) -> None:
    counts = await weather(seed, half_gqa.files, library, actions=1000, longest=60)
    assert counts["preempted"]
    assert counts["handoffs"]
    assert counts["resumed"]
    assert counts[State.FINISHED]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.model
async def test_three_hundred_actions_on_the_default_model(library: Library, default_model: ModelFiles) -> None:
    counts = await weather(7, default_model, library, actions=300, longest=60)
    assert counts["rows"] > 100
