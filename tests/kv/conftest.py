"""Every async test of this folder runs on both event loops: raw sockets behave a little differently on each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.waiting import PATIENCE_S


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _an_owner_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is this process, whose pauses are no silence; only uvloop counts them."""
    monkeypatch.setattr("services.kv.transfer.mapped.SILENT_S", PATIENCE_S)
