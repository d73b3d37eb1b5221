"""The watch can be trusted: what breaks a promise is seen within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from services.decode.decode import Decode
from services.edge.jobs.choice import ChoiceTokens
from services.edge.jobs.inbox import Inbox
from services.edge.jobs.recovery import Recovery
from services.edge.jobs.strangers import Strangers
from services.edge.jobs.vigil import Vigil
from services.kv.ledger import BlockLedger
from tests.simulation.simulate import Failed, simulate

FEW = 60


def nothing(*_: Any, **__: Any) -> None:
    return


def no_holder(*_: Any) -> list[Any]:
    return []


def take_all(self: ChoiceTokens, index: int, tokens: Any, finish: Any) -> bool:
    self.tokens += tokens
    self.finish = finish or self.finish
    return True


@pytest.mark.parametrize(
    ("owner", "method", "broken", "seen"),
    [
        (Vigil, "look", nothing, "stands still"),
        (Strangers, "refuse", nothing, "still computes run"),
        (Recovery, "ask", nothing, "stands still"),
        (Inbox, "on_death", nothing, "whose death its edge knows"),
        (ChoiceTokens, "take", take_all, "tokens"),
        (BlockLedger, "expire", no_holder, "left over"),
        (Decode, "_end", nothing, "run"),
    ],
)
def test_a_broken_promise_is_seen(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., Any], seen: str
) -> None:
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(Failed, match=seen):
        _simulate_some()


def _simulate_some() -> None:
    for seed in range(FEW):
        simulate(seed)
