from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.edge.cluster import Cluster


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.open()
    yield cluster
    await cluster.close()
