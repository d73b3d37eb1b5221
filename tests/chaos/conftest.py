"""Stacks as in tests/e2e, for tests that break them."""

from __future__ import annotations

from tests.e2e.conftest import scripted_stack

__all__ = ["scripted_stack"]
