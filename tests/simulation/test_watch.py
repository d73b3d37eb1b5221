"""The watch can be trusted: what breaks a promise is seen within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.edge.jobs.choice import ChoiceTokens
from services.edge.jobs.inbox import Inbox
from services.edge.jobs.recovery import Recovery
from services.edge.jobs.strangers import Strangers
from services.edge.jobs.vigil import Vigil
from services.kv.ledger import BlockLedger
from services.worker.worker import Worker
from tests.simulation.pinned import SECOND_KINDS
from tests.simulation.simulate import Failed, simulate


def nothing(*_: Any, **__: Any) -> None:
    return


def no_holder(*_: Any) -> list[Any]:
    return []


def take_all(self: ChoiceTokens, index: int, tokens: Any, finish: Any, *_: Any) -> bool:
    self.tokens += tokens
    self.finish = finish or self.finish
    return True


@pytest.mark.parametrize(
    ("owner", "method", "broken", "first", "seen"),
    [
        (Vigil, "look", nothing, 90, "stands still"),
        (Strangers, "refuse", nothing, 0, "still computes run"),
        (Recovery, "ask", nothing, 0, "stands still"),
        (Inbox, "on_death", nothing, 0, "whose death its edge knows"),
        (ChoiceTokens, "take", take_all, 0, "tokens"),
        (BlockLedger, "expire", no_holder, 0, "left over"),
        (Worker, "drop", nothing, 0, "still computes run"),
        (Worker, "stop_choices", nothing, 0, "was stopped"),
    ],
)
def test_a_broken_promise_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., Any], first: int, seen: str
) -> None:
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(Failed, match=seen):
        _simulate_some(first)


def _simulate_some(first: int) -> None:
    for seed in range(first, first + 30):
        simulate(seed, kinds=SECOND_KINDS)
