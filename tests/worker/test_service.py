"""The life of a worker process: it ends when its engine breaks."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.service import _until_stopped
from tests.waiting import PATIENCE_S
from tests.worker.rig import rig


async def test_a_worker_whose_engine_broke_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        monkeypatch.setattr(r.prefill, "on_prefilled", lambda run: 1 / 0)
        serving = asyncio.ensure_future(_until_stopped(r.prefill, asyncio.Event()))
        await r.submit(r.job())
        with pytest.raises(ZeroDivisionError):
            async with asyncio.timeout(PATIENCE_S):
                await serving


async def test_a_worker_that_is_told_to_stop_stops() -> None:
    async with rig() as r:
        stop = asyncio.Event()
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await _until_stopped(r.prefill, stop)
