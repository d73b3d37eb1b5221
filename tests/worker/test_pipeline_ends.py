"""Every way a run can end early without a cancel: refused handoffs, full pools, faults, gone edges, deadlines, drains."""

from __future__ import annotations

from schemas.lifecycle import State
from schemas.state import Cause, Death
from services.bus.typed import send
from services.engine.scripted import Script, Timing
from services.worker.draining import drain
from services.worker.status import status
from tests.waiting import PATIENCE_S
from tests.worker.rig import rig, until


async def test_a_refused_handoff_ends_the_attempt_as_retry():
    async with rig(prefill=Timing(prefill_token_s=0.02)) as r:
        run, _ = await r.submit(r.job())
        r.decode.beats.draining = True
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.RETRY, "handoff_refused")
        await until(r.clean)


async def test_decode_that_is_gone_ends_the_attempt_as_retry():
    async with rig(prefill=Timing(prefill_token_s=0.02)) as r:
        run, _ = await r.submit(r.job())
        r.decode.bus.disconnect()
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.RETRY
        assert r.prefill.engine.pool.held == 0


async def test_a_full_pool_preempts_as_retry_and_the_others_finish():
    async with rig(decode_blocks=8) as r:
        runs = [(await r.submit(r.job([20 + number] * 8, max_tokens=12)))[0] for number in range(2)]
        await until(lambda: all(r.edge.ended(run) for run in runs))
        assert {r.edge.ended(run) for run in runs} == {State.FINISHED, State.RETRY}
        await until(r.clean)


async def test_with_a_swap_space_the_preempted_run_waits_is_shown_and_finishes_too():
    async def answers(r):
        runs = [(await r.submit(r.job([20 + number] * 8, max_tokens=12)))[0] for number in range(2)]
        if r.decode.engine.pool.swap.total:
            await until(lambda: status(r.decode).state.swapped)
            shown = status(r.decode)
            assert (shown.state.swapped, shown.state.running, shown.runs) == (1, 1, 2)
            assert shown.state.swap_used == shown.kv.swapped <= shown.kv.swap_total
            assert shown.kv.withheld > shown.state.credits.kv_blocks == 0
            assert (shown.kv.integrity, shown.kv.orphaned) == ("ok", 0)
        await until(lambda: all(r.edge.ended(run) for run in runs))
        assert {r.edge.ended(run) for run in runs} == {State.FINISHED}
        await until(r.clean)
        return [r.edge.tokens(run) for run in runs]

    async with rig() as plenty, rig(decode_blocks=8, decode_swap=8, decode=Timing(decode_step_s=0.02)) as small:
        assert await answers(plenty) == await answers(small)


async def test_an_engine_fault_fails_its_run_and_no_other():
    script = Script(prompt_contains=(99,), tokens=(50, 51, 52, 53), fail_at=2)
    async with rig(scripts=(script,)) as r:
        bad, _ = await r.submit(r.job([99, 98, 97]))
        good, _ = await r.submit(r.job())
        await until(lambda: r.edge.ended(bad) and r.edge.ended(good))
        assert r.edge.ended(bad) is State.FAILED
        assert r.edge.ended(good) is State.FINISHED
        await until(r.clean)


async def test_a_dead_edge_costs_nothing():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=400))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        send(r.router, r.subjects.dead(r.edge.bus.process), Death(process=r.edge.bus.process, cause=Cause.KILLED))
        await until(r.clean)
        assert len(r.edge.tokens(run)) < 400


async def test_a_silent_edge_costs_nothing():
    async with rig(decode=Timing(decode_step_s=0.05), edge_beats=False) as r:
        run, _ = await r.submit(r.job(max_tokens=400))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        await until(r.clean)
        assert len(r.edge.tokens(run)) < 400


async def test_a_run_ends_at_its_total_deadline():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=400, total_s=2.0))
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.EXPIRED, "total_deadline")
        await until(r.clean)


async def test_drain_refuses_new_work_and_finishes_what_runs():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=20))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        await drain(r.decode, PATIENCE_S)
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        answer = await r.reserve(3, 1)
        assert answer.results[0].reason == "draining"


async def test_drain_gives_up_on_long_runs_as_retry():
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        run, _ = await r.submit(r.job(max_tokens=400))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        await drain(r.decode, 0.1)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.RETRY, "draining")
        await until(r.clean)
