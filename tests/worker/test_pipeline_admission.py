"""What workers take and what they refuse: reservations, one step's queue, jobs that are not theirs."""

from __future__ import annotations

import msgspec

from schemas.job import Tier
from schemas.lifecycle import State
from schemas.placement import Accept, Lease, LeaseItem, LeaseVerb, Refuse
from services.bus.typed import send
from services.decode.leases import LEASE_S
from services.engine.scripted import Timing
from services.kv.holders import ReservationHolder, RunHolder
from tests.worker.rig import rig, until


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


async def test_an_expired_job_is_refused():
    async with rig() as r:
        _, answer = await r.submit(r.job(total_s=-1.0))
        assert isinstance(answer, Refuse)
        assert answer.reason == "expired"


async def test_a_prompt_of_another_model_is_refused():
    async with rig() as r:
        import msgspec

        _, answer = await r.submit(msgspec.structs.replace(r.job(), model="other"))
        assert isinstance(answer, Refuse)
        assert answer.reason == "wrong_model"


async def test_a_reservation_becomes_the_run():
    async with rig(pull_block_s=0.05) as r:
        run, _ = await r.submit(r.job(list(range(20, 30)), max_tokens=3))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        holders = r.decode.engine.pool.holders
        assert ReservationHolder(run) not in holders
        assert len(r.decode.engine.pool.blocks(RunHolder(run))) == 4  # three of the prompt and one to grow into
        await until(lambda: r.edge.ended(run))
        await until(r.clean)
