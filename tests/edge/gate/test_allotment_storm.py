"""Everything at once against one counter: never more than the limit of any minute."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from random import Random

import pytest

from services.clock import ManualClock
from services.edge.gate.allotment import Allotment, Verdict
from tests.edge.gate.test_allotment import FakeCounter

EDGES, TURNS = 4, 200


class Storm:
    """Edges whose clocks differ by up to 20 s, over a counter that loses answers, is away now and then, and gives each edge the
    limit that it was told of last; callers ask for little or for all, give back what they did not use, or give up.

    `out`: what was granted and has not come back, by minute.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.limit = self.random.choice((1, 2, 10, 64, 1000))
        self.counter = FakeCounter(seed, lost=self.random.choice((0.0, 0.2)))
        self.clocks = [ManualClock(epoch=1_700_000_000.0 + self.random.uniform(0, 20)) for _ in range(EDGES)]
        smaller = self.random.randint(1, self.limit)
        self.edges = [
            [Allotment(self.counter, clock, limit, kept_s=0.001) for limit in (self.limit, smaller)] for clock in self.clocks
        ]
        self.out: Count[int] = Count()

    async def caller(self) -> None:
        allotment = self.random.choice(self.random.choice(self.edges))
        amount = self.random.choice((1, self.random.randint(1, self.limit)))
        if await allotment.take(amount, 5.0) is not Verdict.GRANTED:
            return
        minute = allotment.window
        self.out[minute] += amount
        assert self.out[minute] <= self.limit
        for _ in range(self.random.randrange(12)):
            await asyncio.sleep(0)
        unused = self.random.randrange(amount + 1)
        if allotment.window == minute:
            self.out[minute] -= unused
        allotment.give_back(unused, minute)

    async def run(self) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(TURNS):
                callers = [group.create_task(self.caller()) for _ in range(self.random.randrange(6))]
                self.counter.down = self.random.random() < 0.05
                for _ in range(self.random.randrange(6)):
                    await asyncio.sleep(0)
                for each in callers:
                    if self.random.random() < 0.1:
                        each.cancel()
                await asyncio.sleep(self.random.choice((0.0, 0.001)))
                for clock in self.clocks:
                    clock.advance(self.random.choice((0.1, 1.0, 5.0)))


@pytest.mark.parametrize("seed", range(20))
async def test_never_more_than_the_limit_of_a_minute(seed: int) -> None:
    storm = Storm(seed)
    await storm.run()
    assert storm.out
    assert max(storm.out.values()) <= storm.limit
