"""Prefill and decode together on the in-memory bus: the life of a run, and every way it can end early."""

from __future__ import annotations

import msgspec
import pytest

from schemas.codec import decode
from schemas.control import Position, Verb
from schemas.handoff import Handoff
from schemas.job import Tier
from schemas.lifecycle import State
from schemas.placement import Accept, Lease, LeaseItem, LeaseVerb, Refuse
from schemas.reply import FinishReason
from schemas.state import Cause, Death
from services.bus.memory import soon
from services.bus.typed import send
from services.decode.leases import LEASE_S
from services.engine.scripted import Script, Timing
from services.kv.holders import ReservationHolder, RunHolder
from services.worker.draining import drain
from services.worker.status import status
from tests.worker.rig import EOS, rig, until


async def test_a_job_goes_from_prefill_to_decode():
    async with rig() as r:
        run, answer = await r.submit(r.job(max_tokens=8))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [
            (1, State.PREFILLING),
            (1, State.HANDING_OFF),
            (2, State.HANDING_OFF),
            (2, State.DECODING),
            (2, State.FINISHED),
        ]
        assert len(r.edge.tokens(run)) == 8
        assert [frame.finish for frame in r.edge.frames if frame.finish] == [FinishReason.LENGTH]
        assert [f.index for f in r.edge.frames if f.hop == 2] == list(range(8)), "decode's stream alone is complete"
        await until(r.clean)


async def test_the_handoff_changes_no_token():
    async with rig() as r:
        prompts = [list(range(20, 20 + length)) for length in (1, 3, 4, 5, 8, 17, 33)]
        for prompt in prompts:
            apart, _ = await r.submit(r.job(prompt, max_tokens=11))
            here, answer = await r.submit_locally(r.job(prompt, max_tokens=11))
            assert isinstance(answer, Accept)
            await until(lambda runs=(apart, here): all(r.edge.ended(x) for x in runs))
            assert r.edge.tokens(apart) == r.edge.tokens(here)
        await until(r.clean)


async def test_one_token_needs_no_handoff():
    async with rig() as r:
        run, _ = await r.submit(r.job(max_tokens=1))
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [(1, State.PREFILLING), (1, State.FINISHED)]
        await until(r.clean)


async def test_end_of_sequence_stops_with_reason_stop():
    script = Script(prompt_contains=(20, 21), tokens=(50, 51, 52))
    async with rig(scripts=(script,)) as r:
        run, _ = await r.submit(r.job(max_tokens=100))
        await until(lambda: r.edge.ended(run))
        assert r.edge.tokens(run) == [50, 51, 52, EOS]
        assert r.edge.frames[-1].finish is FinishReason.STOP


async def test_cancel_while_prefilling():
    async with rig(prefill=Timing(prefill_token_s=10.0)) as r:  # a step that nobody waits for
        run, _ = await r.submit(r.job())
        await until(lambda: r.edge.states(run))
        r.edge.control(run, to=r.control_of(r.prefill))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        await until(r.clean)


async def test_cancel_while_waiting_behind_another_prompt():
    async with rig(prefill=Timing(prefill_token_s=0.05)) as r:
        first, _ = await r.submit(r.job())
        second, _ = await r.submit(r.job())
        await until(lambda: r.edge.states(second))
        r.edge.control(second, to=r.control_of(r.prefill))
        await until(lambda: r.edge.ended(second))
        assert r.edge.ended(first) is None
        await until(lambda: r.edge.ended(first) is State.FINISHED)
        await until(r.clean)


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
async def test_cancel_while_handing_off(where):
    async with rig(pull_block_s=0.2) as r:
        run, _ = await r.submit(r.job())
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        for worker in (r.prefill, r.decode):
            if where in (worker.role, "both"):
                r.edge.control(run, to=r.control_of(worker))
        await until(r.clean)
        assert r.edge.ended(run) in (State.CANCELLED, State.RETRY)
        assert not [frame for frame in r.edge.frames if frame.hop == 2]


async def test_cancel_while_decoding():
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        run, _ = await r.submit(r.job(max_tokens=200))
        await until(lambda: any(frame.hop == 2 and frame.index > 1 for frame in r.edge.frames))
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        await until(r.clean)


async def test_a_cancel_follows_the_run_to_decode():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=200))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        await until(lambda: len(r.prefill.runs) == 0)
        r.edge.control(run, to=r.control_of(r.prefill))
        await until(lambda: r.edge.ended(run) is State.CANCELLED)
        await until(r.clean)


async def test_a_cancel_that_comes_first_wins():
    async with rig() as r:
        run = 77
        r.edge.control(run, to=r.control_of(r.prefill))
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: r.prefill.runs.cancelled_early(run) and r.decode.runs.cancelled_early(run))
        _, answer = await r.submit(r.job(), reserve=False, run=run)
        assert isinstance(answer, Refuse)
        assert answer.reason == "cancelled"
        reserved = await r.reserve(run, 3)
        assert not reserved.results[0].ok


async def test_a_cancel_frees_a_reservation_whose_run_never_came():
    async with rig() as r:
        await r.reserve(5, 3)
        assert r.decode.engine.pool.held == 3
        r.edge.control(5, to=r.control_of(r.decode))
        await until(r.clean)
        assert r.decode.engine.pool.leases_lapsed == 0


async def test_a_lost_terminal_event_is_said_again():
    async with rig() as r:
        run, _ = await r.submit(r.job())
        await until(lambda: r.edge.ended(run))
        said = len(r.edge.events)
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: len(r.edge.events) > said)
        assert r.edge.events[-1].state is State.FINISHED


async def test_replay_from_an_index():
    async with rig() as r:
        run, _ = await r.submit(r.job(max_tokens=8))
        await until(lambda: r.edge.ended(run))
        tokens = r.edge.tokens(run)
        r.edge.frames.clear()
        positions = (Position(choice=0, index=5),)
        r.edge.control(run, Verb.REPLAY, to=r.control_of(r.decode), positions=positions)
        await until(lambda: r.edge.frames)
        assert [(f.index, f.tokens[0]) for f in r.edge.frames] == [(i, tokens[i]) for i in (5, 6, 7)]


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


async def test_a_decode_worker_without_room_refuses_reservations():
    async with rig(decode_blocks=4) as r:
        answer = await r.reserve(9, 5)
        assert (answer.results[0].ok, answer.results[0].reason) == (False, "no_blocks")
        assert answer.credits.kv_blocks == 4


async def test_a_reservation_that_nobody_renews_runs_out():
    async with rig() as r:
        await r.reserve(5, 3)
        await until(r.clean)


async def test_prefill_renews_reservations_while_it_computes():
    async with rig(prefill=Timing(prefill_token_s=0.3)) as r:
        run, _ = await r.submit(r.job(max_tokens=2))
        started = r.decode.clock.monotonic()
        await until(lambda: (1, State.HANDING_OFF) in r.edge.states(run))
        assert r.decode.clock.monotonic() - started > LEASE_S
        assert r.decode.engine.pool.leases_lapsed == 0
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        await until(r.clean)


async def test_a_released_reservation_is_free_at_once():
    async with rig() as r:
        await r.reserve(5, 3)
        item = LeaseItem(run=5, verb=LeaseVerb.RELEASE)
        send(r.router, r.subjects.decode_lease(r.decode.bus.process), Lease(process="r1", items=(item,)))
        await until(r.clean)
        assert r.decode.engine.pool.leases_lapsed == 0


async def test_the_same_run_is_taken_once():
    async with rig(prefill=Timing(prefill_token_s=0.05)) as r:
        job = r.job()
        run, first = await r.submit(job)
        _, second = await r.submit(job, run=run)
        assert isinstance(first, Accept)
        assert isinstance(second, Refuse)
        assert second.reason == "duplicate"
        await until(lambda: r.edge.ended(run))
        await until(r.clean)


async def test_a_worker_queues_one_steps_work_and_refuses_the_rest():
    async with rig(prefill=Timing(prefill_token_s=0.02)) as r:
        answers = [(await r.submit(r.job(list(range(20, 50)), max_tokens=1)))[1] for _ in range(7)]
        refused = [answer for answer in answers if isinstance(answer, Refuse)]
        assert refused
        assert {answer.reason for answer in refused} == {"no_credit"}
        await until(r.clean)


async def test_an_enterprise_job_is_taken_and_computed_before_what_makes_way_for_it():
    async with rig(prefill=Timing(prefill_token_s=0.02)) as r:
        runs, prompts = list[int](), ([first, *range(20, 49)] for first in range(50, 90))
        while True:
            run, answer = await r.submit(r.job(next(prompts), max_tokens=1))
            if isinstance(answer, Refuse):
                break
            runs.append(run)
        urgent = msgspec.structs.replace(r.job(next(prompts), max_tokens=1), tier=Tier.ENTERPRISE)
        run, answer = await r.submit(urgent)
        assert isinstance(answer, Accept)
        await until(lambda: all(r.edge.ended(other) for other in [*runs, run]))
        ends = [event.run for event in r.edge.events if event.state.terminal]
        assert ends.index(run) < ends.index(runs[-1])
        await until(r.clean)


async def test_versions_of_credits_only_grow():
    async with rig() as r:
        versions = []
        for number in range(3):
            _, answer = await r.submit(r.job([20 + number], max_tokens=1))
            versions.append(answer.credits.version)
        assert versions == sorted(set(versions))


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
        run, _ = await r.submit(r.job(max_tokens=400, total_s=0.5))
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.EXPIRED, "total_deadline")
        await until(r.clean)


async def test_an_expired_job_is_refused():
    async with rig() as r:
        _, answer = await r.submit(r.job(total_s=-1.0))
        assert isinstance(answer, Refuse)
        assert answer.reason == "expired"


async def test_drain_refuses_new_work_and_finishes_what_runs():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=20))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        await drain(r.decode, 5.0)
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


async def test_digests_say_where_runs_stand():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=30))
        await until(lambda: any(e.run == run and e.state is State.DECODING for d in r.edge.digests for e in d.runs))
        await until(lambda: r.edge.ended(run))
        await until(lambda: any(e.run == run and e.state is State.FINISHED for d in r.edge.digests for e in d.runs))
        entry = next(e for d in reversed(r.edge.digests) for e in d.runs if e.run == run)
        assert entry.last == ((0, 29),)


async def test_a_prompt_of_another_model_is_refused():
    async with rig() as r:
        import msgspec

        _, answer = await r.submit(msgspec.structs.replace(r.job(), model="other"))
        assert isinstance(answer, Refuse)
        assert answer.reason == "wrong_model"


async def test_foreign_blocks_are_noticed():
    """The scripted engine computes on what the blocks hold: other bytes, and the run fails instead of going on."""
    async with rig(decode=Timing(decode_step_s=0.2)) as r:
        run, _ = await r.submit(r.job(max_tokens=50))
        await until(lambda: r.decode.engine.pool.blocks(RunHolder(run)))
        block = r.decode.engine.pool.blocks(RunHolder(run))[2]
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        r.decode.engine.pool.view(block)[:] = bytes(64)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FAILED


async def test_a_reservation_becomes_the_run():
    async with rig(pull_block_s=0.05) as r:
        run, _ = await r.submit(r.job(list(range(20, 30)), max_tokens=3))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        holders = r.decode.engine.pool.holders
        assert ReservationHolder(run) not in holders
        assert len(r.decode.engine.pool.blocks(RunHolder(run))) == 4  # three of the prompt and one to grow into
        await until(lambda: r.edge.ended(run))
        await until(r.clean)


@pytest.mark.parametrize("cause", ["cancel", "broken"])
async def test_a_stage_that_ends_before_its_first_step_leaves_nothing(cause, monkeypatch):
    """The cancel is delivered in the turn in which the pull task is made, before the task ran at all."""
    async with rig() as r:

        def deliver(delivery):
            soon(delivery)
            if delivery.target.subject.endswith(".handoff"):
                run = decode(delivery.msg.data, Handoff).run
                r.edge.control(run, to=r.control_of(r.decode))

        if cause == "cancel":
            r.broker.deliver = deliver
        else:
            monkeypatch.setattr(r.decode.engine, "decode", lambda *_, **__: 1 / 0)
        run, _ = await r.submit(r.job())
        await until(lambda: (2, State.FAILED if cause == "broken" else State.CANCELLED) in r.edge.states(run))
        await until(r.clean)  # prefill keeps an offer for 5 s that nobody came for
