from __future__ import annotations

import pytest

from schemas.job import Tier
from schemas.state import QueueReport
from services.clock import ManualClock
from services.router.waiting import EXPECT_S, FRESH_S, Waiting
from tests.router.fakes import MODEL, SUBJECTS, a_job

OURS, OTHER = "router-0000000000000", "router-1111111111111"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def waiting(clock: ManualClock) -> Waiting:
    return Waiting(OURS, SUBJECTS, clock)


def test_counts_by_tier_and_lane(waiting: Waiting, clock: ManualClock) -> None:
    jobs = [a_job(lane=1), a_job(lane=1), a_job(lane=2, tier=Tier.FREE), a_job(model="a/b:c")]
    waiting.counted({waiting.subject(job): 1 for job in jobs}, clock.monotonic())
    assert waiting.lanes(MODEL) == {"paid": {1: 2}, "free": {2: 1}}
    assert waiting.by_tier(MODEL) == {"paid": 2, "free": 1}
    assert waiting.by_tier("a/b:c") == {"paid": 1}
    assert waiting.models() == {"tiny", "a=2Fb=3Ac"}


@pytest.mark.parametrize("junk", ["vip.1.JOB", "paid.16.JOB", "paid.01.JOB", "paid.\u0661.JOB", "paid.1.JOB.more", "paid"])
def test_junk_in_the_queue_holds_nobody_back(waiting: Waiting, clock: ManualClock, junk: str) -> None:
    """Whoever may write there may write anything; what no router pulls is not waited for."""
    waiting.counted({f"hr.jobs.{MODEL}.{junk}".replace("JOB", "0" * 32): 1}, clock.monotonic())
    assert not waiting.models()
    assert not waiting.ahead_of(MODEL, Tier.FREE)


@pytest.mark.parametrize(
    ("waits", "comes", "behind"),
    [
        (Tier.PAID, Tier.PAID, True),
        (Tier.ENTERPRISE, Tier.PAID, True),
        (Tier.FREE, Tier.PAID, False),
        (Tier.PAID, Tier.FREE, True),
    ],
)
def test_same_or_higher_tiers_are_ahead(waiting: Waiting, clock: ManualClock, waits: Tier, comes: Tier, behind: bool) -> None:
    job = a_job(tier=waits)
    waiting.counted({waiting.subject(job): 1}, clock.monotonic())
    assert waiting.ahead_of(MODEL, comes) is behind
    assert not waiting.ahead_of("another", comes)


def test_an_old_count_is_zero(waiting: Waiting, clock: ManualClock) -> None:
    waiting.counted({waiting.subject(a_job()): 1}, clock.monotonic())
    clock.advance(FRESH_S - 0.01)
    assert waiting.ahead_of(MODEL, Tier.PAID)
    clock.advance(0.02)
    assert not waiting.ahead_of(MODEL, Tier.PAID)
    assert waiting.by_tier(MODEL) == {}


def test_what_others_say_counts_for_a_second(waiting: Waiting, clock: ManualClock) -> None:
    waiting.heard(QueueReport(router=OTHER, model=MODEL, waiting={"paid": 3}))
    assert waiting.ahead_of(MODEL, Tier.PAID)
    assert waiting.by_tier(MODEL) == {}, "it is not ours to report"
    clock.advance(FRESH_S + 0.01)
    assert not waiting.ahead_of(MODEL, Tier.PAID)


def test_our_own_report_comes_back_and_does_not_count(waiting: Waiting) -> None:
    waiting.heard(QueueReport(router=OURS, model=MODEL, waiting={"paid": 3}))
    assert not waiting.ahead_of(MODEL, Tier.PAID)


def test_a_job_told_to_queue_counts_until_it_is_seen_or_late(waiting: Waiting, clock: ManualClock) -> None:
    job = a_job(lane=3)
    waiting.expect(job)
    assert waiting.expecting(MODEL)
    assert waiting.lanes(MODEL) == {"paid": {3: 1}}
    waiting.counted({waiting.subject(job): 1}, clock.monotonic())
    assert not waiting.expecting(MODEL)
    assert waiting.lanes(MODEL) == {"paid": {3: 1}}, "once, not twice"
    never = a_job()
    waiting.expect(never)
    clock.advance(EXPECT_S + 0.01)
    assert not waiting.expecting(MODEL)
    assert waiting.lanes(MODEL) == {"paid": {3: 1}}


def test_a_job_that_left_does_not_come_back_with_an_older_count(waiting: Waiting, clock: ManualClock) -> None:
    job = a_job()
    subject = waiting.subject(job)
    waiting.counted({subject: 1}, clock.monotonic())
    asked = clock.monotonic()
    clock.advance(0.01)
    waiting.left(subject)
    assert waiting.by_tier(MODEL) == {}
    waiting.counted({subject: 1}, asked)
    assert waiting.by_tier(MODEL) == {}
    clock.advance(0.01)
    waiting.counted({subject: 1}, clock.monotonic())
    assert waiting.by_tier(MODEL) == {"paid": 1}, "it came back later: that is news"


def test_strange_subjects_are_not_counted(waiting: Waiting, clock: ManualClock) -> None:
    waiting.counted({"hr.jobs.tiny.paid.x.job": 1, "hr.jobs.tiny": 1}, clock.monotonic())
    assert waiting.models() == set()
    waiting.left("hr.jobs.tiny")


def test_old_memories_go(waiting: Waiting, clock: ManualClock) -> None:
    waiting.expect(a_job())
    waiting.heard(QueueReport(router=OTHER, model=MODEL, waiting={"paid": 3}))
    clock.advance(FRESH_S + 0.01)
    waiting.forget_old()
    assert not waiting._expected
    assert not waiting._others


def test_who_cannot_be_pulled_holds_nobody_back(waiting: Waiting, clock: ManualClock) -> None:
    waiting.counted({waiting.subject(a_job(lane=3)): 1}, clock.monotonic())
    waiting.heard(QueueReport(router=OTHER, model=MODEL, waiting={"paid": 1}))
    waiting.pulled(MODEL, False)
    assert not waiting.ahead_of(MODEL, Tier.FREE)
    assert waiting.ahead(MODEL) == {}
    assert waiting.lanes(MODEL) == {"paid": {3: 1}}
    assert waiting.by_tier(MODEL) == {"paid": 1}
    waiting.pulled(MODEL, True)
    assert waiting.ahead_of(MODEL, Tier.FREE)
    assert waiting.ahead(MODEL) == {"paid": {3: 1}}
