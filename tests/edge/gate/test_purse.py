"""What an edge holds of a budget, against a database that loses answers and edges that change their minds."""

from __future__ import annotations

from random import Random

import pytest

from services.edge.gate.purse import LEASE_S, SLICES, Ask, Got, Purse
from services.edge.gate.records import Entry, Used
from tests.edge.fakes import FakeUsage

KEY = ("tenant-acme", "day-2026-11-29")


def purse(limit: int = 6400) -> Purse:
    return Purse(*KEY, limit)


def given(one: Purse, now: float, granted: int, spent: int = 0) -> Ask:
    ask = one.ask(now)
    assert ask is not None
    one.take(ask, Got(granted, spent), now)
    return ask


def lent(amount: int, *, running: int = 0) -> Purse:
    """One that holds `amount`, of which `running` is promised to a request."""
    one = purse()
    one.waiting = max(10, amount - 2 * (6400 // SLICES))
    given(one, 0.0, amount)
    one.waiting = 0
    assert not running or one.grant(running, 0.0)
    return one


def test_nothing_is_granted_that_was_not_lent() -> None:
    one = purse()
    assert not one.grant(1, 0.0)
    one.waiting = 10
    assert given(one, 0.0, 10).want == 10 + 2 * (6400 // SLICES)
    assert one.grant(10, 0.0)
    assert not one.grant(1, 0.0)


def test_a_lease_that_ended_grants_nothing() -> None:
    one = lent(110)
    assert one.grant(10, LEASE_S - 1.5)
    assert not one.grant(10, LEASE_S)
    renewed = one.ask(LEASE_S)
    assert renewed is not None
    assert renewed.keep == 10  # what runs is still counted, what was free may be somebody else's


def test_what_was_handed_over_is_told_at_once() -> None:
    one = lent(110, running=10)
    one.hand_over(10)
    told = given(one, 0.1, 0)
    assert (told.keep, dict(told.charges)) == (100, {})
    assert one.ask(0.2) is None
    assert one.free == 100, "what it used is gone: nobody else is granted it"


@pytest.mark.parametrize("end", ["handed over", "given back"])
def test_what_was_told_in_vain_is_told_again(end: str) -> None:
    one = lent(10, running=10 if end == "handed over" else 0)
    if end == "handed over":
        one.hand_over(10)
    for now in (25.0, 25.25):  # the database could not be asked: others would wait for the end of the lease
        told = one.ask(now)
        assert told is not None
        assert (told.keep, told.want) == (0, 0)
    one.take(told, Got(0, 0), 25.25)
    assert one.empty
    assert one.ask(25.5) is None


def test_what_is_handed_over_during_an_exchange_is_told_with_the_next() -> None:
    one = lent(110, running=10)
    ask = one.ask(11.0)
    assert ask is not None
    one.hand_over(10)
    one.take(ask, Got(0, 0), 11.1)
    later = one.ask(11.2)
    assert later is not None
    assert later.keep == ask.keep - 10


def test_a_budget_of_which_nothing_is_held_is_not_forgotten_before_that_was_told() -> None:
    one = lent(10, running=10)
    ask = one.ask(25.0)
    assert ask is not None
    one.hand_over(10)
    one.take(ask, Got(0, 0), 25.1)
    assert not one.empty
    assert given(one, 25.2, 0).keep == 0
    assert one.empty


def test_an_idle_edge_gives_back_what_it_does_not_use() -> None:
    one = lent(110, running=10)
    one.settle(10, 0, "")
    assert one.ask(5.0) is None
    back = one.ask(21.0)
    assert back is not None
    assert (back.keep, back.want) == (0, 0)


def test_more_than_two_slices_are_not_kept() -> None:
    one = lent(3100, running=3000)
    one.settle(3000, 10, "j")
    ask = one.ask(1.0, {"j"})
    assert ask is not None
    assert (ask.keep, ask.charges) == (2 * (6400 // SLICES), {"j": 10})


def test_a_smaller_budget_is_heeded_at_once() -> None:
    one = purse()
    one.waiting = 10
    given(one, 0.0, 110)
    one.change(20)
    assert not one.grant(1, 0.0)
    ask = one.ask(0.0)
    assert ask is not None
    assert (ask.limit, ask.keep) == (20, 0)


class Edge:
    """One of several that share a budget; `running` are (amount, job)."""

    def __init__(self, name: str, store: FakeUsage, random: Random) -> None:
        self.name = name
        self.purse = purse(1000)
        self.running: list[int] = []
        self.entries: list[Entry] = []
        self._store = store
        self._random = random

    def step(self, now: float) -> int:
        """Take or end something; returns what was used."""
        amount = self._random.randrange(1, 120)
        if self._random.random() < 0.5 and self.purse.grant(amount, now):
            self.running.append(amount)
            self.purse.waiting = 0
        elif self.running and self._random.random() < 0.5:
            return self._end(self.running.pop())
        else:
            self.purse.waiting = amount
        return 0

    def _end(self, amount: int) -> int:
        used, job = self._random.randrange(amount + 1), f"{self._random.getrandbits(128):032x}"
        self.purse.settle(amount, used, job)
        self.entries.append(Entry("acme", "k", Used(job, "m", used, 0)))
        return used

    async def exchange(self, now: float) -> None:
        """Its answer may be lost, before or after it was written."""
        entries = list(self.entries)
        ask = self.purse.ask(now, {entry.used.job for entry in entries})
        if ask is None:
            return
        fate = self._random.random()
        if fate < 0.15:
            return
        got = await self._store.exchange(self.name, entries, [ask], LEASE_S)
        if fate > 0.3:
            del self.entries[: len(entries)]
            self.purse.take(ask, got[KEY], now)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_is_lost_no_budget_is_given_out_twice(seed: int) -> None:
    random, store, used = Random(seed), FakeUsage(), 0
    edges = [Edge(f"e{number}", store, random) for number in range(3)]
    for turn in range(2000):
        edge, now = random.choice(edges), turn * 0.05
        used += edge.step(now)
        if random.random() < 0.4:
            await edge.exchange(now)
        out = sum(each.purse.held for each in edges)
        booked_here = sum(entry.used.tokens for entry in store.entries.values())
        unknown = sum(e.used.tokens for each in edges for e in each.entries if e.used.job in store.entries)
        assert booked_here - unknown + out <= 1000
        assert used <= 1000
    assert used > 800
