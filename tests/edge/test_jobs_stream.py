"""Adoption, order of tokens, replay: what arrives about a job that runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from schemas.control import Verb
from schemas.errors import DeadlineExceeded, JobFailed
from schemas.lifecycle import State
from schemas.reply import Digest, DigestEntry, FinishReason, Frame
from tests.edge.cluster import DECODE, PREFILL, Cluster, collect, draft, process
from tests.waiting import PATIENCE_S, until

RUN, OTHER = 11, 12


async def test_prefill_then_decode(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    assert (job.attempt, job.resume, job.lane, job.deadlines.total) == (1, False, 3, draft().limits.total_s)
    await handle.admitted()
    cluster.own(PREFILL, job, RUN)
    cluster.tokens(PREFILL, job, RUN, 0, [5], hop=1)
    cluster.event(PREFILL, job, RUN, 1, State.HANDING_OFF)
    cluster.own(DECODE, job, RUN, hop=2, state=State.HANDING_OFF)
    cluster.tokens(DECODE, job, RUN, 0, [5])  # decode repeats the first token
    cluster.tokens(DECODE, job, RUN, 1, [6, 7])
    cluster.tokens(DECODE, job, RUN, 2, [7, 8], finish=FinishReason.LENGTH)
    assert await collect(handle) == ([5, 6, 7, 8], FinishReason.LENGTH)
    await until(lambda: len(cluster.edge) == 0)
    assert cluster.controls == []
    assert cluster.cancels == []


async def test_finish_without_tokens(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    cluster.tokens(DECODE, job, RUN, 1, [], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)


async def test_another_run_of_the_same_attempt_is_cancelled(watched: Cluster) -> None:
    watched.answers = [watched.accept(RUN)]
    handle = watched.edge.start(draft())
    job = await watched.submitted(1)
    watched.own(PREFILL, job, RUN)
    other = process("p2")
    for _ in range(5):
        watched.own(other, job, OTHER)
        watched.tokens(other, job, OTHER, 0, [99], hop=1)
    watched.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    await until(lambda: watched.cancelled(other, OTHER))
    assert watched.cancelled(other, OTHER) == 1  # ten messages within 20 ms
    assert watched.cancelled(PREFILL, RUN) == 0


async def test_an_unknown_job_is_cancelled_but_its_end_is_not_answered(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    await collect(handle)
    await until(lambda: len(cluster.edge) == 0)
    cluster.event(DECODE, job, RUN, 2, State.FINISHED)
    cluster.tokens(DECODE, job, OTHER, 0, [5])
    await until(lambda: cluster.cancelled(DECODE, OTHER))
    assert cluster.cancelled(DECODE, RUN) == 0


async def test_owned_before_the_routers_answer(cluster: Cluster) -> None:
    """The answer of the router is lost: the worker's word is enough, and no second attempt starts."""
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, RUN)
    await handle.admitted()
    cluster.tokens(PREFILL, job, RUN, 0, [5], hop=1, finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert len(cluster.jobs) == 1


async def test_a_gap_is_replayed(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    cluster.tokens(DECODE, job, RUN, 2, [7])
    await until(lambda: len(cluster.replays()) >= 2)  # repeated until it is answered
    asked = cluster.replays()[0]
    assert (asked.run, asked.positions[0].choice, asked.positions[0].index) == (RUN, 0, 1)
    assert asked.reply_to == job.reply_to
    cluster.tokens(DECODE, job, RUN, 1, [6])
    cluster.tokens(DECODE, job, RUN, 2, [7], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6, 7], FinishReason.STOP)


async def test_a_lost_tail_shows_in_the_finished_event(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    cluster.event(DECODE, job, RUN, 2, State.FINISHED)
    await until(cluster.replays)
    cluster.tokens(DECODE, job, RUN, 1, [6], finish=FinishReason.LENGTH)
    assert await collect(handle) == ([5, 6], FinishReason.LENGTH)


async def test_a_lost_tail_shows_in_the_digest(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    entry = DigestEntry(run=RUN, job=job.job, attempt=1, hop=2, state=State.DECODING, last=((0, 1),))
    cluster.digest(DECODE, Digest(process=DECODE, runs=(entry,)))
    await until(cluster.replays)
    cluster.tokens(DECODE, job, RUN, 1, [6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)


async def test_a_gap_that_stays_is_a_next_attempt(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN), cluster.accept(OTHER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    cluster.tokens(DECODE, job, RUN, 2, [7])
    again = await cluster.submitted(2)
    assert (again.attempt, again.resume, again.choices[0].generated) == (2, True, (5,))
    assert cluster.cancelled(DECODE, RUN) >= 1
    cluster.tokens(DECODE, again, OTHER, 1, [6], finish=FinishReason.STOP)
    assert await collect(handle) == ([5, 6], FinishReason.STOP)


async def test_cached_tokens_are_the_first_attempts(cluster: Cluster) -> None:
    """The next one finds what the first one computed: that was no hit of the client's prompt."""
    cluster.answers = [cluster.accept(RUN), cluster.accept(OTHER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    assert handle.cached_tokens == 0
    frame = Frame(run=RUN, job=job.job, attempt=1, hop=1, index=0, tokens=(5,), cached_tokens=16)
    cluster.say(PREFILL, frames=[frame])
    cluster.event(PREFILL, job, RUN, 1, State.RETRY, reason="handoff_lost")
    again = await cluster.submitted(2)
    last = Frame(run=OTHER, job=job.job, attempt=again.attempt, hop=1, index=1, tokens=(6,), cached_tokens=48)
    cluster.say(PREFILL, frames=[msgspec.structs.replace(last, finish=FinishReason.STOP)])
    assert await collect(handle) == ([5, 6], FinishReason.STOP)
    assert handle.cached_tokens == 16


async def test_compute_is_summed_over_attempts(cluster: Cluster) -> None:
    """Each frame says what its attempt has taken so far, prefill's part included."""
    cluster.answers = [cluster.accept(RUN), cluster.accept(OTHER)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    first = Frame(run=RUN, job=job.job, attempt=1, hop=1, index=0, tokens=(5,), compute_s=0.5)
    cluster.say(PREFILL, frames=[first])
    cluster.say(DECODE, frames=[msgspec.structs.replace(first, hop=2, compute_s=0.75), first])
    cluster.event(DECODE, job, RUN, 2, State.RETRY, reason="preempted")
    again = await cluster.submitted(2)
    for index, compute_s in ((1, 0.125), (2, 0.25)):
        finish = FinishReason.STOP if index == 2 else None
        frame = Frame(run=OTHER, job=job.job, attempt=again.attempt, hop=1, index=index, tokens=(6,), compute_s=compute_s)
        cluster.say(PREFILL, frames=[msgspec.structs.replace(frame, finish=finish)])
    assert await collect(handle) == ([5, 6, 6], FinishReason.STOP)
    assert handle.compute_s == 1.0


async def test_a_failed_run_is_an_error_after_its_tokens(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.tokens(DECODE, job, RUN, 0, [5])
    cluster.event(DECODE, job, RUN, 2, State.FAILED, error_code="job_failed")
    assert [delta.tokens for delta in await handle.next(PATIENCE_S)] == [[5]]
    with pytest.raises(JobFailed):
        await handle.next(PATIENCE_S)


async def test_a_terminal_event_of_a_former_owner_means_nothing(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    cluster.event(PREFILL, job, RUN, 1, State.RETRY, reason="handoff_refused")
    cluster.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert len(cluster.jobs) == 1


async def test_total_deadline(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft(total_s=0.1))
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    with pytest.raises(DeadlineExceeded):
        await collect(handle)
    await until(lambda: cluster.cancelled(DECODE, RUN))
    cluster.event(DECODE, job, RUN, 2, State.CANCELLED)
    await until(lambda: len(cluster.edge) == 0)


async def test_first_token_deadline(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft(first_token_s=0.1))
    job = await cluster.submitted(1)
    cluster.own(PREFILL, job, RUN)
    with pytest.raises(DeadlineExceeded):
        await collect(handle)
    await until(lambda: cluster.cancelled(PREFILL, RUN))


async def test_a_slow_consumer_reads_many_tokens_at_once(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    for index in range(50):
        cluster.tokens(DECODE, job, RUN, index, [index], finish=FinishReason.STOP if index == 49 else None)
    await asyncio.sleep(0)
    await until(lambda: len(cluster.edge) == 0)
    deltas = await handle.next(PATIENCE_S)
    assert [(delta.tokens, delta.finish) for delta in deltas] == [(list(range(50)), FinishReason.STOP)]
    assert handle.done


async def test_unreadable_messages_harm_nobody(cluster: Cluster) -> None:
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.bus.publish(job.reply_to, b"\xc1nonsense", reply="hr.ctl.x")
    cluster.tokens(DECODE, job, RUN, 0, [5], finish=FinishReason.STOP)
    assert await collect(handle) == ([5], FinishReason.STOP)
    assert all(control.verb is not Verb.CANCEL for _, control in cluster.controls)


# several choices


async def test_a_choice_is_stopped_and_the_others_go_on(watched: Cluster) -> None:
    watched.answers = [watched.accept(RUN)]
    handle = watched.edge.start(replace(draft(), n=2))
    job = await watched.submitted(1)
    assert (job.n, [choice.index for choice in job.choices]) == (2, [0, 1])
    watched.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    watched.tokens(DECODE, job, RUN, 0, [5])
    watched.tokens(DECODE, job, RUN, 0, [7], choice=1)
    await until(lambda: watched.edge._jobs[job.job].tokens.received() == 2)
    handle.stop(0)
    await until(lambda: watched.controls)
    who, control = watched.controls[0]
    assert (who, control.verb, control.run, control.choices) == (DECODE, Verb.CANCEL, RUN, (0,))
    for index in range(1, 4):  # it did not hear
        watched.tokens(DECODE, job, RUN, index, [6])
    watched.tokens(DECODE, job, RUN, 1, [8], choice=1, finish=FinishReason.STOP)
    await until(lambda: len(watched.edge) == 0)
    assert [control.choices for _, control in watched.controls] == [(0,), (0,)]  # once for three messages within 20 ms
    assert [(delta.choice, delta.tokens) for delta in await handle.next(PATIENCE_S)] == [(1, [7, 8])]
    assert handle.done


async def test_a_resume_says_which_choices_are_done(cluster: Cluster) -> None:
    cluster.then = cluster.accept(RUN)
    handle = cluster.edge.start(replace(draft(), n=3))
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    cluster.tokens(DECODE, job, RUN, 0, [5, 6], choice=0)
    cluster.tokens(DECODE, job, RUN, 0, [7], choice=1, finish=FinishReason.STOP)
    cluster.tokens(DECODE, job, RUN, 0, [8], choice=2)
    await until(lambda: cluster.edge._jobs[job.job].tokens.received() == 4)
    handle.stop(2)
    cluster.event(DECODE, job, RUN, 2, State.RETRY, reason="preempted")
    again = await cluster.submitted(2)
    assert [(choice.generated, choice.done) for choice in again.choices] == [((5, 6), False), ((7,), True), ((8,), True)]
    cluster.tokens(DECODE, again, RUN, 2, [9], finish=FinishReason.LENGTH)
    await until(lambda: len(cluster.edge) == 0)
    assert [(delta.choice, delta.tokens) for delta in await handle.next(PATIENCE_S)] == [(0, [5, 6, 9]), (1, [7])]


async def test_logprobs_stay_with_their_tokens(cluster: Cluster) -> None:
    """Lost, doubled and overlapping frames."""
    cluster.answers = [cluster.accept(RUN)]
    handle = cluster.edge.start(draft())
    job = await cluster.submitted(1)
    cluster.own(DECODE, job, RUN, hop=2, state=State.DECODING)
    for index, tokens in ((0, [5, 6]), (1, [6, 7]), (5, [10]), (2, [7, 8, 9, 10])):
        cluster.tokens(DECODE, job, RUN, index, tokens, logprobs=True)
    cluster.tokens(DECODE, job, RUN, 6, [], finish=FinishReason.LENGTH)
    await until(lambda: cluster.edge._jobs.get(job.job) is None)
    (delta,) = await handle.next(PATIENCE_S)
    assert delta.tokens == [5, 6, 7, 8, 9, 10]
    assert [logprob.token for logprob in delta.logprobs] == delta.tokens
