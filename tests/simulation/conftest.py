"""An error that is logged while a seed is told is that seed's failure: see `errors`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _of_nobody_else(nothing_left_over: None) -> None: ...
