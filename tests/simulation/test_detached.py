"""Detached jobs under faults: seeds of their own."""

from __future__ import annotations

from collections import Counter

import pytest

from services.edge.detached.keeper import Keeper
from tests.simulation.detached import tell

SEEDS = 16
ALL_SEEDS = 400
SHARD = 4


@pytest.mark.parametrize("first", range(0, SEEDS, SHARD))
def test_every_invariant_holds_in_each_seed(first: int) -> None:
    outcomes = Counter(outcome for seed in range(first, first + SHARD) for outcome in tell(seed))
    assert outcomes["finished"] > SHARD


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_more() -> None:
    outcomes = Counter(outcome for seed in range(SEEDS, ALL_SEEDS) for outcome in tell(seed))
    assert outcomes["finished"] > ALL_SEEDS - SEEDS


def test_an_edge_that_trusts_a_lapsed_lease_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "_ours", lambda *_: True)
    with pytest.raises(AssertionError, match="is held by"):
        tell(23)
