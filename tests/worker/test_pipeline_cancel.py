"""A cancel reaches a run at every stage, wherever it is, and leaves nothing behind."""

from __future__ import annotations

import pytest

from schemas.codec import decode
from schemas.handoff import Handoff
from schemas.lifecycle import State
from schemas.placement import Refuse
from services.bus.memory import soon
from services.engine.scripted import Timing
from services.kv.transfer.interface import TransferLimits
from tests.worker.rig import rig, until


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


@pytest.mark.parametrize("cause", ["cancel", "broken"])
async def test_a_stage_that_ends_before_its_first_step_leaves_nothing(cause, monkeypatch):
    """The cancel is delivered in the turn in which the pull task is made, before the task ran at all."""
    async with rig(limits=TransferLimits(present_s=1.0)) as r:

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
        await until(r.clean)  # prefill keeps an offer that nobody came for, for `present_s`
