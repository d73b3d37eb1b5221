from __future__ import annotations

import asyncio
from random import Random

import pytest

from schemas.control import CancelJob
from schemas.job import Job
from schemas.placement import Accepted, Queue, Refused, SubmitAnswer
from schemas.state import Cause, Role, WorkerState
from services.bus.memory import Delivery, MemoryBroker, MemoryBus, soon
from services.bus.typed import Refusals, listen
from services.clock import SystemClock
from services.router.admission import Left
from services.router.cancelled import CancelledJobs
from services.router.dispatch import UNHURRIED, Dispatcher, NotTaken, Outcome
from services.router.prefix_index import PrefixIndex
from services.router.view import View
from tests.router.fakes import MODEL, SUBJECTS, FakeWorker, a_job, a_process, a_worker
from tests.waiting import until

WITHIN = 0.25
SLACK = 0.25
"""For a busy test machine; without the budget the slowest case here would take 0.8 s."""


class Bench:
    """A dispatcher, the view it works on, and the workers it sees."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, a_process("router"))
        self.view = View(SystemClock(), self.bus)
        self.index = PrefixIndex()
        self.cancelled = CancelledJobs(SystemClock())
        self.dispatcher = Dispatcher(self.bus, SUBJECTS, self.view, self.index, self.cancelled, Random(5))
        self.last: Outcome

    async def workers(self, *roles: Role, **changes: object) -> list[FakeWorker]:
        await listen(
            self.bus,
            SUBJECTS.worker_state_any(),
            WorkerState,
            lambda state, _: self.view.observe(state) and None,
            refusals=Refusals(),
        )
        made = [await a_worker(self.broker, f"w{number}", role, **changes) for number, role in enumerate(roles)]
        await until(lambda: len(self.view.workers(MODEL)) == len(made))
        return made

    async def place(self, job: Job, within: float, left: Left = UNHURRIED) -> SubmitAnswer:
        """What a caller would hear."""
        self.last = await self.dispatcher.place(job, within, left=left)
        return self.last.answer

    def cancel(self, job: Job) -> None:
        self.cancelled.add(
            CancelJob(job=job.job, attempt=job.attempt, model=job.model, tier=job.tier, lane=job.lane, remember_s=30.0)
        )


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_a_pair_is_reserved_then_submitted(bench: Bench) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    job = a_job(tokens=40)
    answer = await bench.place(job, WITHIN)
    assert isinstance(answer, Accepted)
    assert (answer.prefill, answer.decode, answer.router) == (prefill.process, decode.process, bench.bus.process)
    assert decode.reserved == {answer.run: 4}
    [placement] = prefill.placed
    assert (placement.run, placement.decode, placement.job) == (answer.run, decode.process, job)


async def test_both_takes_the_whole_job(bench: Bench) -> None:
    [both] = await bench.workers(Role.BOTH)
    answer = await bench.place(a_job(), WITHIN)
    assert isinstance(answer, Accepted)
    assert (answer.prefill, answer.decode) == ("", both.process)
    assert [placement.decode for placement in both.placed] == [""]
    assert both.heard == ["submit"]


async def test_no_credit_asks_nobody(bench: Bench) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE, slots=0)
    assert await bench.place(a_job(), WITHIN) == Queue(router=bench.bus.process, reason="no_credit")
    assert prefill.heard == decode.heard == []


async def test_what_can_never_fit_is_refused(bench: Bench) -> None:
    await bench.workers(Role.PREFILL, Role.DECODE)
    answer = await bench.place(a_job(tokens=2000), WITHIN)
    assert isinstance(answer, Refused)
    assert answer.code == "context_length_exceeded"


async def test_an_unknown_model_is_refused_with_retry_after(bench: Bench) -> None:
    answer = await bench.place(a_job(model="nobody"), WITHIN)
    assert isinstance(answer, Refused)
    assert answer.code == "model_loading"
    assert answer.retry_after


@pytest.mark.parametrize("how", ["refuses", "silent"])
@pytest.mark.parametrize(("role", "step"), [(Role.PREFILL, "submit"), (Role.DECODE, "lease")])
async def test_the_next_best_is_tried(bench: Bench, how: str, role: Role, step: str) -> None:
    workers = await bench.workers(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    bad, good = [worker for worker in workers if worker.role is role]
    getattr(bad, how).add(step)
    for _ in range(4):  # whichever of the two a tie begins with
        answer = await bench.place(a_job(), WITHIN)
        assert isinstance(answer, Accepted)
        assert good.process in (answer.prefill, answer.decode)
    held = {run for worker in workers for run in worker.reserved}
    accepted = {run for worker in workers if worker is not bad for run in worker.runs}
    await until(lambda: {run for worker in workers for run in worker.reserved} <= accepted, what=f"released of {held}")


@pytest.mark.parametrize("how", ["refuses", "silent"])
async def test_nobody_takes_it(bench: Bench, how: str) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    getattr(prefill, how).add("submit")
    started = asyncio.get_running_loop().time()
    answer = await bench.place(a_job(), WITHIN)
    assert isinstance(answer, Queue)
    assert asyncio.get_running_loop().time() - started < WITHIN + SLACK
    await until(lambda: not decode.reserved, what="the reservation is released")


async def test_the_budget_bounds_many_silent_workers(bench: Bench) -> None:
    workers = await bench.workers(*[Role.PREFILL] * 8, Role.DECODE)
    for worker in workers[:8]:
        worker.silent.add("submit")
    loop = asyncio.get_running_loop()
    started = loop.time()
    assert await bench.place(a_job(), WITHIN) == Queue(router=bench.bus.process, reason="no_answer")
    assert loop.time() - started < WITHIN + SLACK
    await until(lambda: not workers[8].reserved)


async def test_each_try_is_a_run_of_its_own(bench: Bench) -> None:
    first, second, _ = await bench.workers(Role.PREFILL, Role.PREFILL, Role.DECODE)
    first.silent.add("submit")  # it takes the work, and its answer is lost
    while not first.placed:
        answer = await bench.place(a_job(), WITHIN)
        assert isinstance(answer, Accepted)
    assert first.runs.isdisjoint(second.runs)
    assert answer.run in second.runs


async def test_a_lease_whose_answer_was_lost_is_released(bench: Bench) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    decode.silent.add("lease")
    assert isinstance(await bench.place(a_job(), WITHIN), Queue)
    await until(lambda: "lease release" in decode.heard)
    assert not decode.reserved
    assert not prefill.placed


async def test_a_worker_that_nobody_hears_is_passed_over_at_once(bench: Bench) -> None:
    workers = await bench.workers(Role.PREFILL, Role.PREFILL, Role.DECODE)
    await workers[0].bus.close()
    for _ in range(4):
        answer = await bench.place(a_job(), WITHIN)
        assert isinstance(answer, Accepted)
        assert answer.prefill == workers[1].process


async def test_cancelled_before_it_is_placed(bench: Bench) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    job = a_job()
    bench.cancel(job)
    answer = await bench.place(job, WITHIN)
    assert isinstance(answer, Refused)
    assert answer.reason == "cancelled"
    assert prefill.heard == decode.heard == []


async def test_cancelled_between_lease_and_submit(bench: Bench) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    job = a_job()

    def deliver(delivery: Delivery) -> None:
        if delivery.msg.subject == SUBJECTS.decode_lease(decode.process):
            bench.cancel(job)
        soon(delivery)

    bench.broker.deliver = deliver
    answer = await bench.place(job, WITHIN)
    assert isinstance(answer, Refused)
    assert answer.reason == "cancelled"
    assert not prefill.placed
    await until(lambda: decode.heard == ["lease reserve", "lease release"])
    assert not decode.reserved


async def test_a_burst_is_spread_by_what_was_just_placed(bench: Bench) -> None:
    """Between two beats the router's own charges are all it has: no worker is asked beyond its credit."""
    workers = await bench.workers(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, slots=2, beats=False)
    answers = await asyncio.gather(*(bench.place(a_job(tokens=32), WITHIN) for _ in range(10)))
    assert sum(isinstance(answer, Accepted) for answer in answers) == 4
    assert [len(worker.reserved) for worker in workers if worker.role is Role.DECODE] == [2, 2]


async def test_a_refusal_does_not_use_up_the_only_slot(bench: Bench) -> None:
    busy, _, decode = await bench.workers(Role.PREFILL, Role.PREFILL, Role.DECODE, slots=1, beats=False)
    busy.refuses.add("submit")
    while "submit" not in busy.heard:
        answer = await bench.place(a_job(), WITHIN)
        assert isinstance(answer, Accepted)
        decode.reserved.clear()
        decode.beat()
        await until(lambda: bench.view.workers(MODEL)[-1].decode_slots == 1)


async def test_our_own_connection_is_down(bench: Bench) -> None:
    await bench.workers(Role.PREFILL, Role.DECODE)
    bench.bus.disconnect()
    assert isinstance(await bench.place(a_job(), WITHIN), Queue)
    assert [worker.decode_slots for worker in bench.view.workers(MODEL)] == [4, 4], "nothing stays charged"


async def test_a_job_too_large_for_the_bus_is_refused() -> None:
    bench = Bench()
    bench.broker.max_payload = 4_000
    await bench.workers(Role.PREFILL, Role.DECODE)
    answer = await bench.place(a_job(tokens=1_000), WITHIN)
    assert isinstance(answer, Refused)
    assert answer.code == "message_too_large"


async def test_a_model_whose_last_worker_just_died_is_waited_for(bench: Bench) -> None:
    both = (await bench.workers(Role.BOTH))[0]
    bench.view.died(both.process, Cause.KILLED)
    answer = await bench.place(a_job(), WITHIN)
    assert isinstance(answer, Queue)
    assert answer.reason == "no_worker"
    refused = await bench.place(a_job(model="never-served"), WITHIN)
    assert isinstance(refused, Refused)
    assert refused.code == "model_loading"


@pytest.mark.parametrize(
    ("how", "step", "reason"),
    [
        ("refuses", "submit", "busy"),
        ("silent", "submit", "no_answer"),
        ("refuses", "lease", "no_slot"),
        ("silent", "lease", "no_answer"),
    ],
)
async def test_who_did_not_take_it_is_told_with_the_reason(bench: Bench, how: str, step: str, reason: str) -> None:
    prefill, decode = await bench.workers(Role.PREFILL, Role.DECODE)
    bad = prefill if step == "submit" else decode
    getattr(bad, how).add(step)
    assert isinstance(await bench.place(a_job(), WITHIN), Queue)
    assert bench.last.tried == (NotTaken(bad.process, reason),)
