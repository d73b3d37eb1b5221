"""What an operator sees of a worker's runs, and runs that he ends there."""

from __future__ import annotations

import pytest

from schemas.errors import NotFound
from schemas.lifecycle import State
from schemas.reply import BY_OPERATOR
from services.engine.scripted import Timing
from services.worker.held import Held
from tests.worker.rig import rig, until


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
