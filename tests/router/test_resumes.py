"""New work leaves to resumed jobs what they wait for."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.job import SUSPECT, Tier
from schemas.placement import Accepted, Queue
from schemas.state import Role
from services.clock import ManualClock
from services.router.placement_workers import Pool
from services.router.resumes import FRESH_S, Resumes
from tests.router.fakes import MODEL, a_job
from tests.router.harness import House, eventually
from tests.waiting import until

OLD, NEW = Pool("a", "old", 16), Pool("b", "new", 16)


def resumes() -> tuple[Resumes, ManualClock]:
    clock = ManualClock()
    return Resumes(clock), clock


def test_of_its_tier_and_weights_only() -> None:
    waiting, _ = resumes()
    waiting.unplaced(a_job(resume=True, weights="old", tier=Tier.PAID))
    assert waiting.left_for(MODEL, Tier.PAID, [OLD, NEW]) == [NEW]
    assert waiting.left_for(MODEL, Tier.FREE, [OLD, NEW]) == [NEW]
    assert waiting.left_for(MODEL, Tier.ENTERPRISE, [OLD, NEW]) == [OLD, NEW]
    assert waiting.left_for("another", Tier.FREE, [OLD, NEW]) == [OLD, NEW]


def test_until_it_is_placed_or_does_not_ask_any_more() -> None:
    waiting, clock = resumes()
    job = a_job(resume=True, weights="old")
    waiting.unplaced(job)
    waiting.placed(job)
    assert waiting.left_for(MODEL, Tier.FREE, [OLD]) == [OLD]
    waiting.unplaced(job)
    clock.advance(FRESH_S + 0.01)
    assert waiting.left_for(MODEL, Tier.FREE, [OLD]) == [OLD]


def test_a_suspect_holds_nobody_back() -> None:
    waiting, _ = resumes()
    waiting.unplaced(replace(a_job(resume=True, weights="old"), deaths=SUSPECT))
    assert waiting.left_for(MODEL, Tier.FREE, [OLD]) == [OLD]


async def test_a_resume_that_asks_again_overtakes_queue_and_new_work(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0, queued=1)
    resumed, queued = a_job(resume=True, weights="w"), a_job()
    assert isinstance(await house.submit(resumed), Queue)
    await house.put(queued)
    await until(lambda: house.routers[0].waiting.by_tier(MODEL) == {"paid": 1})
    assert isinstance(await house.submit(resumed), Queue)
    both.free()
    assert isinstance(await house.submit(a_job(tier=Tier.FREE)), Queue)
    assert not both.placed
    assert isinstance(await house.submit(resumed), Accepted)
    await eventually(house.empty)
    assert [placement.job.job for placement in both.placed] == [resumed.job, queued.job]


async def test_one_that_never_comes_back_holds_up_for_a_moment_only(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0, queued=1)
    assert isinstance(await house.submit(a_job(resume=True, weights="w")), Queue)
    both.free()
    assert isinstance(await house.submit(a_job()), Queue)
    view, submits = house.routers[0].view, house.routers[0].submits
    await until(lambda: submits._resumes.left_for(MODEL, Tier.PAID, view.pools(MODEL)))
    assert isinstance(await house.submit(a_job()), Accepted)
