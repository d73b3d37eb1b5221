"""Log-probabilities of the prompt on their way to the client: before all tokens, each once, also when something is lost."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as altered

from schemas.job import Job, pack_ids
from schemas.lifecycle import State
from schemas.reply import PROMPT, FinishReason
from services.edge.jobs.draft import Draft
from services.edge.jobs.handle import JobHandle
from tests.edge.cluster import DECODE, PREFILL, Cluster, collect, draft
from tests.waiting import until

RUN, NEXT = 11, 12
PROMPT_IDS = list(range(20, 30))


def asking() -> Draft:
    plain = draft()
    return replace(plain, prompt=pack_ids(PROMPT_IDS), sampling=altered(plain.sampling, prompt_logprobs=2))


def scored(cluster: Cluster, job: Job, first: int, end: int, *, run: int = RUN, who: str = PREFILL) -> None:
    cluster.tokens(who, job, run, first, PROMPT_IDS[first:end], hop=1, choice=PROMPT, logprobs=True)


def known(handle: JobHandle) -> list[int]:
    return [logprob.token for logprob in handle.prompt_logprobs]


async def test_in_pieces_and_before_the_tokens(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    assert job.sampling.prompt_logprobs == 2
    cluster.own(PREFILL, job, RUN)
    scored(cluster, job, 1, 5)
    scored(cluster, job, 5, 10)
    cluster.tokens(DECODE, job, RUN, 0, [5, 6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)
    assert known(handle) == PROMPT_IDS[1:]
    assert cluster.replays() == []


async def test_what_was_lost_is_asked_of_who_computed_it(cluster: Cluster) -> None:
    """Decode owns the run by then, and has nothing of the prompt."""
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, RUN)
    scored(cluster, job, 1, 5)
    cluster.own(DECODE, job, RUN, hop=2, state=State.HANDING_OFF)
    cluster.tokens(DECODE, job, RUN, 0, [5, 6])
    await until(lambda: any(who == PREFILL and c.positions for who, c in cluster.controls))
    positions = next(c.positions for who, c in cluster.controls if who == PREFILL)
    assert [(one.choice, one.index) for one in positions] == [(PROMPT, 5), (0, 0)]
    assert await handle.next(0.01) == [], "no token before the prompt"
    scored(cluster, job, 5, 10)
    cluster.tokens(DECODE, job, RUN, 0, [5, 6, 7], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6, 7], FinishReason.STOP)
    assert known(handle) == PROMPT_IDS[1:]


async def test_a_hole_in_the_prompt_is_noticed_at_once(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, RUN)
    scored(cluster, job, 4, 10)
    await until(cluster.replays)
    scored(cluster, job, 1, 10)
    cluster.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    await collect(handle)
    assert known(handle) == PROMPT_IDS[1:]


async def test_a_resume_asks_for_what_is_not_here_and_not_again(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN), cluster.accept(NEXT), cluster.accept(13)]
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, RUN)
    scored(cluster, job, 1, 5)
    cluster.event(PREFILL, job, RUN, 1, State.RETRY, reason="preempted")
    again = await cluster.submitted(2)
    assert (again.resume, again.sampling.prompt_logprobs) == (True, 2)
    cluster.own(PREFILL, again, NEXT)
    scored(cluster, again, 1, 10, run=NEXT)
    cluster.tokens(PREFILL, again, NEXT, 0, [5], hop=1)
    cluster.event(PREFILL, again, NEXT, 1, State.RETRY, reason="preempted")
    last = await cluster.submitted(3)
    assert last.sampling.prompt_logprobs is None, "all are here: the cache may spare the prompt"
    cluster.tokens(DECODE, last, 13, 1, [6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)
    assert known(handle) == PROMPT_IDS[1:]


async def test_lost_for_ever_is_computed_again(cluster: Cluster) -> None:
    """Nobody answers the replay: the next attempt says everything."""
    cluster.answers = [cluster.accept(RUN), cluster.accept(NEXT)]
    handle = cluster.edge.start(asking())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5, 6], finish=FinishReason.STOP)
    again = await cluster.submitted(2)
    assert again.choices[0].generated == ()
    scored(cluster, again, 1, 10, run=NEXT)
    cluster.tokens(DECODE, again, NEXT, 0, [5, 6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)
    assert known(handle) == PROMPT_IDS[1:]
