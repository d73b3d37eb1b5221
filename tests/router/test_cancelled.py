from __future__ import annotations

import msgspec
import pytest

from schemas.control import CancelJob
from schemas.job import Job
from services.clock import ManualClock
from services.router.cancelled import CancelledJobs
from tests.router.fakes import a_job


def cancel(job: Job, remember_s: float = 30.0) -> CancelJob:
    return CancelJob(job=job.job, attempt=job.attempt, model=job.model, tier=job.tier, lane=job.lane, remember_s=remember_s)


@pytest.mark.parametrize(("asked", "cancelled"), [(1, True), (2, True), (3, False)])
def test_the_attempt_and_earlier_ones(asked: int, cancelled: bool) -> None:
    jobs, job = CancelledJobs(ManualClock()), a_job(attempt=2)
    jobs.add(cancel(job))
    assert (msgspec.structs.replace(job, attempt=asked) in jobs) is cancelled
    assert a_job() not in jobs


def test_remembered_until_the_queue_deadline_however_often_it_is_repeated() -> None:
    clock = ManualClock()
    jobs, short, long = CancelledJobs(clock), a_job(), a_job()
    for _ in range(3):
        jobs.add(cancel(long, 30.0))
        jobs.add(cancel(short, 10.0))
    assert len(jobs) == 2
    clock.advance(10.1)
    assert short not in jobs
    assert long in jobs
    clock.advance(20.0)
    assert len(jobs) == 0
    jobs.add(cancel(short, 10.0))
    assert short in jobs
