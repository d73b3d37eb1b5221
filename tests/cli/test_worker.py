"""A worker whose engine is being built: minutes for a large model, in which it answers whoever asks."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from schemas.state import Role
from services.bus.memory import MemoryBroker, MemoryBus
from services.cli import worker
from services.clock import SystemClock
from services.engine.build import build_engine
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings
from services.telemetry.metrics import Metrics
from tests.text.tiny import write_tiny_model_folder
from tests.waiting import PATIENCE_S


async def test_it_says_what_it_is_at_while_its_engine_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model_folder(tmp_path / "tiny")
    settings = Settings(model=str(tmp_path / "tiny"), worker=WorkerSettings(engine="scripted"))
    broker, clock, metrics = MemoryBroker(), SystemClock(), Metrics.null()
    bus, operator = MemoryBus(broker, "d1"), MemoryBus(broker, "operator")
    building, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        building.set()
        assert go_on.wait(PATIENCE_S)
        return build_engine(*arguments)

    monkeypatch.setattr(worker, "build_engine", slow)
    loading = asyncio.create_task(worker._load(settings, bus, Role.DECODE, clock, metrics, asyncio.Event()))
    assert await asyncio.to_thread(building.wait, PATIENCE_S)
    status = await operator.request("hr.admin.decode.d1.status", b"{}", timeout=PATIENCE_S)
    assert "into the scripted engine" in json.loads(status.data)["loading"]["doing"]
    assert json.loads((await operator.request("$SRV.PING", b"", timeout=PATIENCE_S)).data)["name"] == "headrace-decode"
    go_on.set()
    engine = await loading
    assert engine is not None
    assert engine.info.name == "scripted"
