"""Stacks as in tests/e2e, for tests that break them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import StartScripted, scripted_stacks


@pytest.fixture(scope="module")
def scripted_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartScripted]:
    with scripted_stacks(tmp_path_factory) as start:
        yield start
