"""Submits as requests: what the edge hears, and when."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from schemas.errors import NoResponders
from schemas.job import Job, Tier
from schemas.placement import Accepted, Queue, Refused, SubmitAnswer
from schemas.state import Cause, Death, QueueReport, Role
from services.bus.typed import Refusals, ask, listen, send
from tests.router.fakes import MODEL, SUBJECTS, a_job, a_process, a_state
from tests.router.harness import EDGE_WAITS_S, House
from tests.waiting import PATIENCE_S, until


async def test_a_job_is_placed(house: House) -> None:
    prefill, decode = await house.workers(Role.PREFILL, Role.DECODE)
    answer = await house.submit(a_job())
    assert isinstance(answer, Accepted)
    assert (answer.prefill, answer.decode) == (prefill.process, decode.process)


async def test_no_credit_is_queue(house: House) -> None:
    await house.workers(Role.PREFILL, Role.DECODE, slots=0)
    assert isinstance(await house.submit(a_job()), Queue)


async def test_no_worker_is_refused(house: House) -> None:
    answer = await house.submit(a_job())
    assert isinstance(answer, Refused)
    assert answer.code == "model_loading"


async def test_a_named_router_takes_a_submit_too(house: House) -> None:
    await house.workers(Role.BOTH)
    subject = SUBJECTS.router_submit(house.routers[0].status().router)
    assert isinstance(await ask(house.edge, subject, a_job(attempt=2), SubmitAnswer, timeout=PATIENCE_S), Accepted)


async def test_the_answer_is_in_time_when_workers_are_silent(house: House) -> None:
    workers = await house.workers(*[Role.PREFILL] * 8, Role.DECODE)
    for worker in workers[:8]:
        worker.silent.add("submit")
    assert isinstance(await house.submit(a_job(), EDGE_WAITS_S), Queue)  # raises RequestTimeout when it is late
    await until(lambda: not workers[8].reserved)


@pytest.mark.parametrize(("waits", "answer"), [(Tier.PAID, Queue), (Tier.ENTERPRISE, Queue), (Tier.FREE, Accepted)])
async def test_new_work_waits_behind_its_tier_and_higher_ones(house: House, waits: Tier, answer: type) -> None:
    await house.workers(Role.BOTH)
    other = QueueReport(router=a_process("router"), model=MODEL, waiting={waits: 1})
    send(house.edge, SUBJECTS.queue(MODEL), other)
    assert isinstance(await house.submit(a_job(tier=Tier.PAID)), answer)


async def test_a_resume_waits_for_nobody(house: House) -> None:
    await house.workers(Role.BOTH)
    send(house.edge, SUBJECTS.queue(MODEL), QueueReport(router=a_process("router"), model=MODEL, waiting={"enterprise": 9}))
    assert isinstance(await house.submit(a_job(tier=Tier.FREE, resume=True, attempt=2, weights="w")), Accepted)


async def test_a_resume_without_its_weights_is_model_changed(house: House) -> None:
    await house.workers(Role.BOTH)
    answer = await house.submit(a_job(resume=True, attempt=2, weights="gone"))
    assert isinstance(answer, Refused)
    assert answer.code == "model_changed"


async def test_what_can_never_fit_does_not_wait_its_turn(house: House) -> None:
    await house.workers(Role.BOTH)
    send(house.edge, SUBJECTS.queue(MODEL), QueueReport(router=a_process("router"), model=MODEL, waiting={"paid": 9}))
    answer = await house.submit(a_job(tokens=5_000))
    assert isinstance(answer, Refused)
    assert answer.code == "context_length_exceeded"


async def test_the_second_job_waits_behind_the_first_that_was_told_to_queue(house: House) -> None:
    [both] = await house.workers(Role.BOTH, slots=0)
    assert isinstance(await house.submit(a_job()), Queue)
    both.free()
    await until(lambda: house.routers[0].view.workers(MODEL)[0].decode_slots)
    assert isinstance(await house.submit(a_job()), Queue)


async def test_a_queue_that_is_down_does_not_touch_the_fast_path(house: House) -> None:
    await house.workers(Role.BOTH)
    house.queue.down = True
    assert isinstance(await house.submit(a_job()), Accepted)


async def test_a_draining_worker_gets_no_new_work(house: House) -> None:
    first, second = await house.workers(Role.BOTH, Role.BOTH)
    first.draining = True
    first.beat()
    await until(lambda: any(worker.draining for worker in house.routers[0].view.workers(MODEL)))
    for _ in range(3):
        assert isinstance(await house.submit(a_job()), Accepted)
    assert (len(first.placed), len(second.placed)) == (0, 3)


async def test_a_killed_worker_gets_nothing_more(house: House) -> None:
    first, second = await house.workers(Role.BOTH, Role.BOTH)
    send(house.edge, SUBJECTS.dead(first.process), Death(process=first.process, cause=Cause.KILLED))
    await until(lambda: len(house.routers[0].view.workers(MODEL)) == 1)
    for _ in range(3):
        assert isinstance(await house.submit(a_job()), Accepted)
    assert (len(first.placed), len(second.placed)) == (0, 3)


async def test_a_replaced_worker_is_announced_three_times(house: House) -> None:
    deaths: list[Death] = []
    await listen(house.edge, SUBJECTS.dead_any(), Death, lambda death, _: deaths.append(death), refusals=Refusals())
    older, newer = a_process("w", 1_000.0), a_process("w", 2_000.0)
    for process in (older, newer):
        send(house.edge, SUBJECTS.worker_state(Role.BOTH, MODEL, process), a_state(process, Role.BOTH))
    await until(lambda: len(deaths) == 3)
    assert set(deaths) == {Death(process=older, cause=Cause.REPLACED)}
    assert [worker.process for worker in house.routers[0].view.workers(MODEL)] == [newer]


async def test_an_unreadable_job_is_refused_and_counted(house: House) -> None:
    house.edge.publish(SUBJECTS.submit(MODEL), b"\x81\xa6schema\x01")
    await until(lambda: house.refusals.refused["submit", "unreadable_message"] == 1)


async def test_two_routers_share_the_work_and_respect_credit(house_of_two: House) -> None:
    prefill, decode = await house_of_two.workers(Role.PREFILL, Role.DECODE, slots=6)
    answers = await asyncio.gather(*(house_of_two.submit(a_job()) for _ in range(12)))
    accepted = [answer for answer in answers if isinstance(answer, Accepted)]
    assert len(accepted) == 6
    assert len(decode.reserved) == 6, "a slot that was taken twice was refused"
    assert {answer.run for answer in accepted} == prefill.runs == set(decode.reserved)
    assert set(Counter(answer.router for answer in accepted)) == {router.status().router for router in house_of_two.routers}


async def test_two_models_do_not_mix(house: House) -> None:
    [one] = await house.workers(Role.BOTH)
    [two] = await house.workers(Role.BOTH, model="org/other:1")
    jobs: list[Job] = [a_job(), a_job(model="org/other:1")]
    for job in jobs:
        assert isinstance(await house.submit(job), Accepted)
    assert [placement.job for placement in one.placed + two.placed] == jobs


async def test_drain_answers_what_it_took_and_takes_no_more(house: House) -> None:
    workers = await house.workers(Role.PREFILL, Role.DECODE)
    workers[0].silent.add("submit")
    job = a_job()
    submit = asyncio.create_task(house.submit(job))
    await until(lambda: workers[0].placed)
    await house.routers[0].drain()
    assert isinstance(await submit, Queue)
    with pytest.raises(NoResponders):
        await house.submit(a_job())


async def test_status_is_what_it_sees(house: House) -> None:
    workers = await house.workers(Role.PREFILL, Role.DECODE)
    seen = house.routers[0].status()
    assert [worker.process for worker in seen.models[MODEL].workers] == sorted(worker.process for worker in workers)


async def test_reports_come_also_when_nothing_waits_and_no_worker_lives(house: House) -> None:
    await until(lambda: len(house.reports) >= 3)
    assert {report.model for report in house.reports} == {MODEL}
    assert not any(report.waiting or report.card for report in house.reports)
    await house.workers(Role.BOTH)
    await until(lambda: any(report.card for report in house.reports))
