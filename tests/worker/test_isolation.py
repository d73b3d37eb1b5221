"""A job whose owners died twice computes alone: the others end first, nobody joins it, and the next of its kind waits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.errors import ContextLengthExceeded
from schemas.job import SUSPECT, Job
from schemas.lifecycle import State
from schemas.placement import Accept, Refuse
from services.engine.scripted import Timing
from tests.worker.rig import Rig, rig, until

SLOW = Timing(decode_step_s=0.02)
SLOW_PROMPTS = Timing(prefill_token_s=0.02)


def suspect(r: Rig, max_tokens: int = 8) -> Job:
    return replace(r.job(max_tokens=max_tokens), deaths=SUSPECT)


async def test_on_decode_the_others_end_as_retry_before_it_computes():
    async with rig(decode=SLOW) as r:
        others = [(await r.submit(r.job(max_tokens=200)))[0] for _ in range(3)]
        await until(lambda: all((2, State.DECODING) in r.edge.states(run) for run in others))
        run, answer = await r.submit(suspect(r))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        assert {(r.edge.ended(other), r.edge.reason(other)) for other in others} == {(State.RETRY, "isolated")}
        events = [(event.run, event.state) for event in r.edge.events]
        decoding = events.index((run, State.DECODING))
        assert all(events.index((other, State.RETRY)) < decoding for other in others)
        await until(r.clean)


async def test_on_prefill_too():
    async with rig(prefill=SLOW_PROMPTS) as r:
        other, _ = await r.submit(r.job(list(range(20, 60)), max_tokens=200))
        run, answer = await r.submit(suspect(r))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        assert (r.edge.ended(other), r.edge.reason(other)) == (State.RETRY, "isolated")
        await until(r.clean)


async def test_where_it_prefills_and_decodes():
    async with rig(decode=SLOW) as r:
        other, _ = await r.submit_locally(r.job(max_tokens=200))
        await until(lambda: r.edge.tokens(other))
        run, answer = await r.submit_locally(suspect(r))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        assert r.edge.reason(other) == "isolated"
        await until(r.clean)


async def test_nobody_joins_it_and_another_one_waits():
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit_locally(suspect(r, max_tokens=20))
        for job in (r.job(), suspect(r)):
            _, answer = await r.submit_locally(job)
            assert isinstance(answer, Refuse)
            assert answer.reason == "isolating"
        assert (await r.reserve(99, 1)).results[0].reason == "isolating"
        await until(lambda: r.edge.ended(run) is State.FINISHED)
        _, answer = await r.submit_locally(suspect(r))
        assert isinstance(answer, Accept)


async def test_it_can_be_cancelled_while_it_waits_for_the_others():
    async with rig(decode=Timing(decode_step_s=0.2)) as r:
        other, _ = await r.submit_locally(r.job(max_tokens=200))
        await until(lambda: r.edge.tokens(other))
        run, _ = await r.submit_locally(suspect(r))
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: r.edge.ended(run) is State.CANCELLED)
        await until(r.clean)


async def test_one_that_the_engine_refuses_after_all_is_tried_elsewhere(monkeypatch: pytest.MonkeyPatch):
    """Nobody waits for it here any more, and it holds nothing."""
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        other, _ = await r.submit_locally(r.job(max_tokens=200))
        await until(lambda: r.edge.tokens(other))

        def refuse(*_: object, **__: object) -> None:
            raise ContextLengthExceeded("Too long.")

        monkeypatch.setattr(r.decode.engine, "prefill", refuse)
        run, answer = await r.submit_locally(suspect(r))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.RETRY, ContextLengthExceeded.code)
        await until(r.clean)
