"""When old rows of the ledger are looked for."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from schemas.errors import StoreUnavailable
from services.edge.gate import retention
from services.edge.gate.retention import forget_old
from services.telemetry.metrics import Metrics
from tests.waiting import until


class Store:
    """`answers`, then nothing more to forget."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []

    async def sweep(self, keep_s: float) -> bool:
        self.asked.append(keep_s)
        answer = self.answers.pop(0) if self.answers else False
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_it_goes_on_while_there_is_more_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "SWEEP_S", 0.02)
    monkeypatch.setattr(retention, "AGAIN_S", 0.0)
    store = Store(True, True, False, StoreUnavailable("The database cannot be used now."), ValueError("odd"), True)
    metrics = Metrics.collecting("edge-test")
    task = asyncio.create_task(forget_old(store, 5.0, Random(1), metrics))
    try:
        await until(lambda: len(store.asked) > 7)
    finally:
        task.cancel()
    assert set(store.asked) == {5.0}
    assert b'headrace_store_failures_total{operation="sweep"' in metrics.prometheus_text()
