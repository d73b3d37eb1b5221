"""The benches of the router's size run, on little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.router_decision import MEMORY, bound, memory
from bench.router_decision import main as decision
from bench.router_scale import main as scale
from bench.router_scale import scale as simulate


def test_every_placement_is_made_and_nobody_is_above_its_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale(["--workers", "4", "8", "--seconds", "1", "--out", str(tmp_path)]) == 0
    assert "8 workers" in capsys.readouterr().out
    small, large = json.loads((tmp_path / "router-scale.json").read_text())
    assert small["good"] == large["good"] == 1.0
    assert large["placements_s"] == pytest.approx(80, rel=0.3)
    assert (tmp_path / "router-scale.png").stat().st_size > 0


def test_all_but_the_time_it_took_is_drawn_by_seed() -> None:
    first, second = (simulate(8, 1.0, seed=3) for _ in range(2))
    assert (first.placements_s, first.ttft_p99, first.hit_rate) == (second.placements_s, second.ttft_p99, second.hit_rate)


def test_decisions_are_timed_by_workers_and_by_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decision(["--decisions", "5", "--workers", "8", "16", "--tokens", "128", "--out", str(tmp_path)]) == 0
    assert "16 workers" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "router-decision.json").read_text())) == 3
    assert (tmp_path / "router-decision.png").stat().st_size > 0


@pytest.mark.parametrize(("workers", "holders", "alike"), MEMORY)
def test_the_prefix_index_keeps_to_its_bound(workers: int, holders: int, alike: int) -> None:
    assert 0.3 * bound(workers) < memory(workers, holders, alike, blocks=150_000) <= bound(workers)
