from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from services.clock import ManualClock
from tests.edge.cluster import Cluster


@pytest.fixture(scope="session", autouse=True)
def _no_disk() -> Iterator[None]:
    """SQLite waits for none, as PostgreSQL in `tests.postgres_fixture`: on a slow one writers wait beyond their deadlines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.edge.store.sqlite.SYNCHRONOUS", "OFF")
        yield


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.open()
    yield cluster
    await cluster.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def watched(clock: ManualClock) -> AsyncIterator[Cluster]:
    """A cluster whose edge looks when it is told to: its clock stands still, so its own looks find nothing."""
    cluster = Cluster(clock)
    await cluster.open()
    yield cluster
    await cluster.close()
