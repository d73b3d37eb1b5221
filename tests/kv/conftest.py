"""Every async test of this folder runs on both event loops: raw sockets behave a little differently on each."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.kv.rig import nixl_agents


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="package", autouse=True)
def _nixl_ends() -> Iterator[None]:
    """Threads of an agent poll for as long as it lives: its tests' own end here, not with the last test of all folders."""
    yield
    for agent in nixl_agents() if nixl_agents.cache_info().currsize else ():
        agent.close()
    nixl_agents.cache_clear()
    gc.collect()
