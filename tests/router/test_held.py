"""What an operator sees of the jobs that a router knows, and jobs that he ends there."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import InvalidRequest, NotFound
from schemas.lifecycle import State
from schemas.reply import BY_OPERATOR
from schemas.state import EdgeBeat, Role
from services.bus.typed import send
from services.clock import SystemClock
from tests.router.fakes import EDGE, SUBJECTS, a_job
from tests.router.harness import House
from tests.waiting import until


async def test_what_waits_is_shown(house: House) -> None:
    await house.workers(Role.BOTH, slots=0)
    job = a_job(lane=4)
    await house.put(job)
    await until(lambda: list(house.routers[0].held.jobs()))
    [row] = house.routers[0].held.jobs()
    assert (row.job, row.state, row.model, row.tier, row.lane) == (job.job, State.QUEUED, job.model, job.tier, 4)


async def test_what_is_being_placed_is_shown(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    both.silent.add("submit")
    job = a_job()
    asked = asyncio.create_task(house.submit(job))
    await until(lambda: both.placed)
    [row] = house.routers[0].held.jobs()
    assert (row.job, row.state, row.edge) == (job.job, State.SUBMITTED, EDGE)
    await asked
    await until(lambda: not house.routers[0].submits.placing())


async def test_its_edge_is_told_of_a_job_that_shall_end(house: House) -> None:
    router = house.routers[0]
    with pytest.raises(NotFound):
        router.held.cancel("0" * 32)
    send(house.edge, SUBJECTS.edge_state(EDGE), EdgeBeat(process=EDGE, sent=SystemClock().wall()))
    await until(router.edges.alive)
    assert router.held.cancel("0" * 32).told == [EDGE]
    await until(lambda: house.events)
    [event] = house.events
    assert (event.job, event.state, event.reason, event.attempt) == ("0" * 32, State.CANCELLED, BY_OPERATOR, 0)


@pytest.mark.parametrize("job", ["", "x", "0" * 31, "0" * 33, "A" * 32, "*", ">", "0" * 1_000_000])
async def test_what_is_no_job_is_told_to_nobody(house: House, job: str) -> None:
    router = house.routers[0]
    send(house.edge, SUBJECTS.edge_state(EDGE), EdgeBeat(process=EDGE, sent=SystemClock().wall()))
    await until(router.edges.alive)
    with pytest.raises(InvalidRequest) as refusal:
        router.held.cancel(job)
    assert len(refusal.value.message) < 200
    assert not house.events
