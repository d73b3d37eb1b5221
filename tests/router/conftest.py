from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.router.harness import House, a_house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """One router."""
    async with a_house() as house:
        yield house


@pytest.fixture
async def house_of_two() -> AsyncIterator[House]:
    """Two routers."""
    async with a_house(routers=2) as house:
        yield house


@pytest.fixture
async def house_that_rarely_counts() -> AsyncIterator[House]:
    """One router that counts the queue when it starts, and then once a minute."""
    async with a_house(poll_s=60.0) as house:
        yield house
