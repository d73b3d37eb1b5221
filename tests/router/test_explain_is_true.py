"""Whatever a router sees: what `explain` says of a job is what a submit of it then gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.job import Job, Tier
from schemas.placement import Accepted, Queue, Refused, SubmitAnswer
from schemas.state import Cause, QueueReport, Role, WorkerState
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Refusals, ask, listen
from services.clock import ManualClock
from services.router.cancelled import CancelledJobs
from services.router.dispatch import Dispatcher
from services.router.entry import Entry
from services.router.explain import Explainer
from services.router.gate import Gate
from services.router.precedence import Precedence
from services.router.prefix_index import PrefixIndex
from services.router.resumes import Resumes
from services.router.submit import Submits
from services.router.view import View
from services.router.waiting import Waiting
from services.worker.edges import EdgeWatch
from tests.router.fakes import EDGE, MODEL, SUBJECTS, a_job, a_process, a_worker
from tests.waiting import until

ANSWER_S = 15.0
LANE = 3


@dataclass(frozen=True)
class Seen:
    """`workers`: role and what differs from an idle one. `waiting`: another router's count. `resumes`: tiers that ask again.

    `closed`: tiers whose lane was turned away a moment ago. `served`: the model's last worker died just now.
    """

    workers: list[tuple[Role, dict[str, object]]]
    waiting: dict[str, int]
    resumes: list[Tier]
    closed: list[Tier]
    served: bool


workers = st.tuples(
    st.sampled_from(Role),
    st.fixed_dictionaries(
        {},
        optional={
            "slots": st.integers(0, 3),
            "blocks": st.sampled_from([1, 3, 30, 100]),
            "queued": st.integers(0, 2),
            "running": st.integers(0, 2),
            "draining": st.booleans(),
            "backlog_s": st.sampled_from([0.01, 0.5, 3.0, 50.0]),
        },
    ),
)
seens = st.builds(
    Seen,
    st.lists(workers, max_size=4),
    st.dictionaries(st.sampled_from([tier.value for tier in Tier]), st.integers(0, 2), max_size=2),
    st.lists(st.sampled_from(Tier), max_size=1),
    st.lists(st.sampled_from(Tier), max_size=1),
    st.booleans(),
)
jobs = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from([1, 40, 600, 1200]),
        "tier": st.sampled_from(Tier),
        "first_token_s": st.sampled_from([0.2, 2.0, 60.0]),
    }
)


class Site:
    """The parts of a router that answer a submit, at a time that stands still."""

    def __init__(self, seen: Seen) -> None:
        clock, self.random = ManualClock(), Random(5)
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, a_process("router"))
        self.clock, self.view = clock, View(clock, self.bus)
        index, waiting, resumes = PrefixIndex(), Waiting(self.bus.process, SUBJECTS, clock), Resumes(clock)
        waiting.heard(QueueReport(router=a_process("router"), model=MODEL, waiting=seen.waiting))
        for tier in seen.resumes:
            resumes.unplaced(a_job(resume=True, attempt=2, tier=tier, weights="w"))
        entry, gate = Entry(waiting, EdgeWatch(self.bus, clock), clock), Gate()
        for tier in seen.closed:
            gate.close(tier, LANE, clock.monotonic() + 30.0)
        entry._gates[MODEL] = gate
        precedence = Precedence(self.view, waiting, resumes, self.random)
        self.explainer = Explainer(self.bus.process, self.view, index, entry, precedence, clock, self.random)
        dispatcher = Dispatcher(self.bus, SUBJECTS, self.view, index, CancelledJobs(clock), self.random)
        self.submits = Submits(
            self.bus, waiting, dispatcher, resumes, entry, precedence, self.explainer, ANSWER_S, lambda model: None
        )

    async def open(self, seen: Seen) -> None:
        see = lambda state, _: self.view.observe(state) and None  # noqa: E731
        await listen(self.bus, SUBJECTS.worker_state_any(), WorkerState, see, refusals=Refusals())
        await listen(self.bus, SUBJECTS.submit_any(), Job, self.submits.on_submit, refusals=Refusals())
        if seen.served:
            dead = await a_worker(self.broker, "dead", Role.BOTH)
            await until(lambda: self.view.workers(MODEL))
            self.view.died(dead.process, Cause.KILLED)
        for number, (role, changes) in enumerate(seen.workers):
            await a_worker(self.broker, f"w{number}", role, **({"beats": False} | changes))
        await until(lambda: len(self.view.workers(MODEL)) == len(seen.workers))

    async def submit(self, job: Job) -> SubmitAnswer:
        answer: SubmitAnswer = await ask(
            MemoryBus(self.broker, EDGE), SUBJECTS.submit(MODEL), job, SubmitAnswer, timeout=ANSWER_S
        )
        return answer


def said(answer: SubmitAnswer) -> tuple[object, ...]:
    match answer:
        case Accepted():
            return "placed", "", None, answer.prefill, answer.decode
        case Queue():
            return "queue", answer.reason, None, "", ""
        case Refused():
            return "refused", answer.reason, answer.retry_after, "", ""


async def check(seen: Seen, wanted: dict[str, object]) -> None:
    site = Site(seen)
    await site.open(seen)
    job = a_job(lane=LANE, stamp=site.clock.wall(), **wanted)  # type: ignore[arg-type]
    before = site.random.getstate()
    told = site.explainer.explain(job)
    site.random.setstate(before)
    answer = await site.submit(job)
    assert (told.outcome, told.reason, told.retry_after, told.prefill, told.decode) == said(answer)


@settings(deadline=None, max_examples=150)
@given(seens, jobs)
def test_what_is_explained_is_what_a_submit_gets(seen: Seen, wanted: dict[str, object]) -> None:
    asyncio.run(check(seen, wanted))


async def test_behind_others_a_model_that_lost_its_last_worker_is_waited_for() -> None:
    site = Site(Seen([], {"paid": 1}, [], [], served=True))
    await site.open(Seen([], {}, [], [], served=True))
    assert said(await site.submit(a_job(lane=LANE, stamp=site.clock.wall())))[:2] == ("queue", "no_worker")
