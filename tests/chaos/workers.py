"""The statuses of named workers, asked one by one: quicker than `Operator.workers`, which waits for whoever may answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tests.chaos.processes import process_id
from tests.e2e.operator import Operator
from tests.e2e.running import Up

ROLES = {"p": "prefill", "d": "decode", "b": "both"}


class Workers:
    """Status subjects of the workers that now have these names."""

    def __init__(self, op: Operator, up: Up, names: Sequence[str]) -> None:
        self._op = op
        self._subjects = [f"hr.admin.{ROLES[name[0]]}.{process_id(up, name)}.status" for name in names]

    async def idle_after(self, within: float) -> float:
        """Seconds until no worker had a run or a block that is not free or cached. Raises AssertionError."""
        started = time.monotonic()
        while True:
            statuses = await asyncio.gather(*(self._op.ask(subject) for subject in self._subjects))
            took = time.monotonic() - started
            if not any(status["runs"] or status["kv"]["held"] for status in statuses):
                assert all(status["kv"]["integrity"] == "ok" for status in statuses), statuses
                return took
            assert took < within, statuses

    async def at_most(self, runs: int, within: float) -> None:
        """Until all of them together have no more runs than that. Raises AssertionError."""
        await self._until(lambda found: found <= runs, within)

    async def at_least(self, runs: int, within: float) -> None:
        """Until they have so many. Raises AssertionError."""
        await self._until(lambda found: found >= runs, within)

    async def _until(self, wanted: Callable[[int], bool], within: float) -> None:
        started = time.monotonic()
        while True:
            statuses = await asyncio.gather(*(self._op.ask(subject) for subject in self._subjects))
            if wanted(sum(status["runs"] for status in statuses)):
                return
            assert time.monotonic() - started < within, statuses
