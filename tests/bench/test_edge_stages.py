"""The bench of an edge's stages runs, and finds something to measure in every stage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop

import bench.edge_stages
from bench.edge_stages import measure, table
from tests.text.tiny import write_tiny_model_folder

pytestmark = pytest.mark.slow


def test_every_stage_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    write_tiny_model_folder(folder)
    monkeypatch.setattr(bench.edge_stages, "LONG", 16)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        a_token, a_request = runner.run(measure("tiny", folder, tmp_path, rounds=1, count=64))
    assert list(a_token)[-1] == list(a_request)[-1] == "Granian, socket"
    assert all(value > 0 for value in a_request.values())
    assert table("of a request", a_request).count("\n") == len(a_request) + 2
