"""Overload as an edge sees it: who is turned away by a router, and who still gets in."""

from __future__ import annotations

from schemas.job import LANES, Tier
from schemas.placement import Accepted, Queue, Refused
from schemas.state import Role
from tests.router.fakes import MODEL, a_job
from tests.router.harness import House
from tests.waiting import until


async def test_free_is_turned_away_while_paid_waits_and_a_resume_is_placed(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0, queued=1)
    await house.put(*(a_job(tier=Tier.FREE, lane=number % LANES, salt=b"%d" % number) for number in range(20)))
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {"free": 20})
    both.free()
    await until(lambda: len(both.placed) == 20, what="how fast the queue drains is known")
    both.full()
    await house.put(*(a_job(tier=Tier.FREE, lane=number % LANES) for number in range(64)))
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {"free": 64})
    router = house.routers[0]
    await until(
        lambda: router.entry.ask(a_job(tier=Tier.FREE, queue_s=2.0)) is not None, what="64 jobs that do not move are a long wait"
    )
    away = await house.submit(a_job(tier=Tier.FREE, queue_s=2.0))
    assert isinstance(away, Refused)
    assert away.code == "no_capacity"
    assert away.reason
    assert away.retry_after is not None
    assert 1.0 <= away.retry_after <= 120.0
    assert isinstance(await house.submit(a_job(tier=Tier.PAID)), Queue)
    both.free()
    resumed = await house.submit(a_job(tier=Tier.FREE, attempt=2, resume=True, generated=(1,)))
    assert isinstance(resumed, Accepted)


async def test_kv_that_is_nearly_full_waits_for_the_higher_tier(house: House) -> None:
    await house.workers(Role.BOTH, blocks=3, running=1)
    assert isinstance(await house.submit(a_job(tokens=30, tier=Tier.FREE)), Queue)
    assert isinstance(await house.submit(a_job(tokens=30, tier=Tier.ENTERPRISE)), Accepted)
