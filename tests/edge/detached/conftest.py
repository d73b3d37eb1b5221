"""Two edges that share a database; each has jobs that the other one may adopt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.edge.detached.rig import QUICK, Pair, pair


@pytest.fixture
def lease_s() -> float:
    return QUICK.lease_s


@pytest.fixture
async def edges(tmp_path: Path, lease_s: float) -> AsyncIterator[Pair]:
    async with pair(tmp_path, lease_s=lease_s) as made:
        yield made
