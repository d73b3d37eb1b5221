from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.edge.store.database import Database, database_url
from tests.edge.migrated import migrated
from tests.edge.responses.rig import ResponsesApi


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with migrated(database_url("", tmp_path)) as made:
        yield made


@pytest.fixture
async def api(database: Database) -> AsyncIterator[ResponsesApi]:
    api = ResponsesApi(database)
    yield api
    await api.background.close()
