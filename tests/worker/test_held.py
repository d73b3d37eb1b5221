"""What an operator sees of a worker's runs, and runs that he ends there."""

from __future__ import annotations

import time

import pytest

from schemas.errors import NotFound
from schemas.lifecycle import State
from schemas.reply import BY_OPERATOR
from schemas.state import EdgeBeat
from services.bus.typed import send
from services.engine.scripted import Timing
from services.worker.held import Held
from tests.router.harness import eventually
from tests.worker.rig import rig, until
from tests.worker.test_detached import SECOND, adopt, detached, second_edge, taking_over


async def test_a_run_is_shown_and_ended_with_the_reason() -> None:
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        job = r.job(max_tokens=200)
        run, _ = await r.submit(job)
        held = Held(r.decode)
        await until(lambda: any(one.state is State.DECODING for one in held.jobs()))
        [row] = held.jobs()
        assert (row.job, row.run, row.worker, row.edge) == (job.job, f"{run:016x}", r.decode.bus.process, job.edge)
        assert row.age_s is not None
        assert 0 <= row.age_s < 30
        held.cancel(job.job)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.CANCELLED, BY_OPERATOR)
        await until(r.clean)
        with pytest.raises(NotFound):
            held.cancel(job.job)


async def test_a_run_that_computes_its_prompt_is_ended_too() -> None:
    async with rig(prefill=Timing(prefill_token_s=0.05)) as r:
        job = r.job(list(range(20, 60)))
        run, _ = await r.submit(job)
        Held(r.prefill).cancel(job.job)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.CANCELLED, BY_OPERATOR)
        await until(lambda: not len(r.prefill.runs))


async def test_a_run_that_was_to_go_on_elsewhere_is_ended_instead() -> None:
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        job = r.job(max_tokens=200)
        run, _ = await r.submit(job)
        held = Held(r.decode)
        await until(lambda: any(one.state is State.DECODING for one in held.jobs()))
        [moving] = r.decode.runs
        r.decode.drop(moving, State.RETRY, "draining")
        held.cancel(job.job)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.CANCELLED, BY_OPERATOR)
        await until(r.clean)


async def test_who_adopts_a_job_hears_of_the_operator_from_both_sides_of_a_handoff() -> None:
    """Its edge is dead, so only the runs' ends are left to tell it; one that is cancelled without a reason is resumed."""
    async with rig(pull_block_s=0.2) as r:
        run, _ = await r.submit(job := detached(r))
        await until(lambda: r.decode.runs.get(run))
        for worker in (r.prefill, r.decode):
            worker.edges.died(job.edge)
        Held(r.prefill).cancel(job.job)
        await until(r.clean)
        edge = await second_edge(r)

        async def told_by_both() -> bool:
            await adopt(r, edge, taking_over(r, job))  # each listens for the job from its own next look on
            return {event.hop for event in edge.events if event.state.terminal} == {1, 2}

        await eventually(told_by_both)
        ends = {(event.hop, event.state, event.reason) for event in edge.events if event.state.terminal}
        assert ends == {(hop, State.CANCELLED, BY_OPERATOR) for hop in (1, 2)}


async def test_of_a_detached_job_every_edge_is_told() -> None:
    """Whoever took it over from a dead edge, or does so next."""
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        await r.submit(job := detached(r, tokens=200))
        await until(lambda: any(one.state is State.DECODING for one in Held(r.decode).jobs()))
        edge = await second_edge(r)
        send(edge.bus, r.subjects.edge_state(SECOND), EdgeBeat(process=SECOND, sent=time.time()))
        await until(lambda: SECOND in r.decode.edges.alive())
        Held(r.decode).cancel(job.job)
        await until(lambda: edge.events)
        assert [(event.run, event.job, event.reason) for event in edge.events] == [(0, job.job, BY_OPERATOR)]
        await until(r.clean)
