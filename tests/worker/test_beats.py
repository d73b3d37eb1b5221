"""What a worker says of itself costs one look at its engine, whoever asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.engine.protocol import EngineStats
from tests.worker.rig import Rig, rig


def counted(r: Rig, monkeypatch: pytest.MonkeyPatch) -> list[EngineStats]:
    """Each look at the prefill engine's statistics from now on."""
    looks: list[EngineStats] = []
    stats: Callable[[], EngineStats] = r.prefill.engine.stats

    def look() -> EngineStats:
        looks.append(stats())
        return looks[-1]

    monkeypatch.setattr(r.prefill.engine, "stats", look)
    return looks


async def test_a_beat_and_an_answer_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        looks = counted(r, monkeypatch)
        for say in (r.prefill.beats.state, r.prefill.beats.credits, lambda: r.prefill.refused(1, "busy")):
            looks.clear()
            say()
            assert len(looks) == 1
