"""Prefill and decode with an engine that moves KV itself (TensorRT-LLM's double): the life of a run, and every way it can end.

Bounds of a cancel: before commit one iteration; after it the transfer and one chunk; decode lost: the timeout and one tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from schemas.errors import from_code
from schemas.job import Choice, Grammar, Sampling
from schemas.lifecycle import State
from schemas.placement import Accept, Refuse
from schemas.reply import by_operator
from schemas.state import Role
from services.bus.memory import soon
from services.engine.trtllm_engine.capabilities import capabilities
from services.settings.trtllm import TrtllmSettings
from services.worker.draining import drain
from services.worker.held import Held
from services.worker.status import status
from tests.engine.trtllm_engine.double import EOS, World
from tests.engine.trtllm_engine.rig import answer, build
from tests.waiting import PATIENCE_S
from tests.worker.rig import Rig, rig, until

PROMPT = list(range(20, 30))


@asynccontextmanager
async def pair(world: World, *, timeout_s: float = 1.0) -> AsyncIterator[Rig]:
    """Workers with TensorRT-LLM's double; the prefill engine is world.engines[0], the decode engine [1]."""
    engines = {"p1": build(world, Role.PREFILL, timeout_s), "d1": build(world, Role.DECODE, timeout_s)}
    for engine in engines.values():
        await engine.warm_up()
    async with rig(engines=dict(engines)) as r:
        yield r


def free(world: World, r: Rig) -> bool:
    """No block is in use, by the engines and by our books."""
    return all(engine.used == 0 for engine in world.engines) and r.clean()


async def test_a_job_goes_from_prefill_to_decode() -> None:
    world = World()
    async with pair(world) as r:
        run, taken = await r.submit(r.job(PROMPT, max_tokens=8))
        assert isinstance(taken, Accept)
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [
            (1, State.PREFILLING),
            (1, State.HANDING_OFF),
            (2, State.HANDING_OFF),
            (2, State.DECODING),
            (2, State.FINISHED),
        ]
        assert r.edge.tokens(run) == answer(PROMPT, 8)
        assert [i for f in r.edge.frames if f.hop == 2 for i in range(f.index, f.index + len(f.tokens))] == list(range(8))
        assert min(f.index for f in r.edge.frames if f.hop == 1) == 0, "the first token comes before the handoff"
        await until(lambda: free(world, r))
        assert len(world.consumed) == 1


async def test_many_at_once_are_each_consumed_once() -> None:
    world = World(transfer_s=0.02)
    async with pair(world) as r:
        runs = [(await r.submit(r.job([20 + i] * (3 + i), max_tokens=6)))[0] for i in range(6)]
        await until(lambda: all(r.edge.ended(run) for run in runs), timeout=20.0)
        assert {r.edge.ended(run) for run in runs} == {State.FINISHED}
        assert [r.edge.tokens(run) for run in runs] == [answer([20 + i] * (3 + i), 6) for i in range(6)]
        assert len(set(world.consumed)) == len(world.consumed) == 6
        await until(lambda: free(world, r))


async def test_one_token_and_an_end_at_once_need_no_handoff() -> None:
    world = World()
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=1))
        await until(lambda: r.edge.ended(run))
        world.answer = lambda prompt, generated: EOS
        other, _ = await r.submit(r.job(max_tokens=9))
        await until(lambda: r.edge.ended(other))
        for one in (run, other):
            assert r.edge.states(one) == [(1, State.PREFILLING), (1, State.FINISHED)]
        assert world.consumed == []
        await until(lambda: free(world, r))


async def test_a_cancel_before_commit_takes_one_iteration() -> None:
    world = World()
    async with pair(world) as r:
        world.prefill_s = 30.0  # not of the request that warms it up
        run, _ = await r.submit(r.job())
        await until(lambda: world.engines[0].active)
        r.edge.control(run, to=r.control_of(r.prefill))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        assert world.engines[0].used == 0
        await until(lambda: free(world, r))


async def test_a_cancel_that_comes_as_the_prompt_is_done_consumes_the_handoff() -> None:
    world = World(prefill_s=0.1)
    async with pair(world) as r:
        world.engines[0].late_abort = 10**6
        run, _ = await r.submit(r.job(max_tokens=100))
        await until(lambda: world.engines[0].active)
        r.edge.control(run, to=r.control_of(r.prefill))
        await until(lambda: (2, State.CANCELLED) in r.edge.states(run))
        await until(lambda: free(world, r))
        assert len(world.consumed) == 1
        assert len(world.engines[1].asked[-1].generated) <= 20


async def test_an_operator_ends_a_job_whose_run_goes_on_to_decode() -> None:
    """Decode, which drops the run, does not know who wanted that: its edge would resume the job."""
    world = World(prefill_s=0.1)
    async with pair(world) as r:
        world.engines[0].late_abort = 10**6
        job = r.job(max_tokens=100)
        run, _ = await r.submit(job)
        await until(lambda: world.engines[0].active)
        Held(r.prefill).cancel(job.job)
        await until(lambda: (2, State.CANCELLED) in r.edge.states(run))
        assert by_operator(job.job) in r.edge.events
        await until(lambda: free(world, r))


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
async def test_a_cancel_after_commit_takes_the_transfer_and_one_chunk(where: str) -> None:
    world = World(transfer_s=0.3)
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=100))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        for worker in (r.prefill, r.decode):
            if where in (worker.role, "both"):
                r.edge.control(run, to=r.control_of(worker))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        assert len(world.consumed) == 1
        assert len(world.engines[1].asked[-1].generated) <= 4
        await until(lambda: free(world, r))


async def test_a_client_that_left_before_its_handoff_came_has_it_consumed() -> None:
    """Its cancel reaches decode before the handoff does, and even its reservation is gone."""
    world = World(prefill_s=0.1)
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=100))
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: r.decode.runs.cancelled_early(run))
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), len(world.consumed)) == (State.CANCELLED, 1)
        await until(lambda: free(world, r))


async def test_a_cancel_while_decoding() -> None:
    world = World()
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=200))
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        r.edge.control(run, to=r.control_of(r.prefill))  # which forwards it
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        await until(lambda: free(world, r))


async def test_an_expired_or_draining_or_full_decode_consumes_all_the_same() -> None:
    world = World()
    async with pair(world) as r:
        world.prefill_s = 1.5
        late, _ = await r.submit(r.job(total_s=1.0, max_tokens=50))  # Unix time: it is to reach its worker however slow we are
        await until(lambda: r.edge.ended(late))
        assert r.edge.ended(late) in (State.EXPIRED, State.CANCELLED)
        drained, _ = await r.submit(r.job(max_tokens=6))
        r.decode.beats.draining = True
        await until(lambda: r.edge.ended(drained))
        assert r.edge.ended(drained) is State.FINISHED, "it keeps what it reserved"
        await until(lambda: free(world, r))
        assert not world.handoffs


async def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_is_consumed_twice() -> None:
    world = World()
    async with pair(world) as r:
        lost: list[str] = []

        def deliver(delivery: object) -> None:
            subject = delivery.target.subject  # type: ignore[attr-defined]
            if subject.startswith("_INBOX") and "p1" in subject and not lost and world.engines[1].asked[1:]:
                lost.append(subject)
                return
            soon(delivery)  # type: ignore[arg-type]

        r.broker.deliver = deliver
        run, _ = await r.submit(r.job(max_tokens=40))
        await until(lambda: r.edge.ended(run))
        assert lost, "the answer to the handoff was lost"
        assert r.edge.ended(run) is State.FINISHED
        assert r.edge.tokens(run) == answer(PROMPT, 40)
        assert len(world.consumed) == 1
        await until(lambda: free(world, r))


async def test_a_handoff_of_another_engine_is_refused_and_ends_as_retry() -> None:
    world = World()
    async with pair(world) as r:
        r.decode.engine.info = replace(r.decode.engine.info, kv_compat="another")  # type: ignore[misc]
        run, _ = await r.submit(r.job())
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.reason(run)) == (State.RETRY, "handoff_refused")
        assert world.consumed == []


async def test_a_resume_of_what_a_grammar_describes_fails_as_ours_not_the_clients() -> None:
    """Its client sends it again: a 5xx says that it may."""
    world = World()
    async with pair(world) as r:
        engine = r.prefill.engine
        engine.info = replace(engine.info, capabilities=capabilities(TrtllmSettings(guided_decoding="xgrammar")))  # type: ignore[misc]
        begun = msgspec.structs.replace(
            r.job(),
            attempt=2,
            resume=True,
            choices=(Choice(index=0, generated=(50,)),),
            sampling=Sampling(seed=1, max_tokens=8, grammar=Grammar(kind="json_object")),
        )
        run, _ = await r.submit(begun)
        await until(lambda: r.edge.ended(run))
        (end,) = (event for event in r.edge.events if event.run == run and event.state is State.FAILED)
        assert (end.reason, end.error_code) == ("grammar_begun", "job_failed")
        error = from_code(end.error_code, "")
        assert (error.status, error.type) == (500, "server_error")
        assert world.consumed == []


async def test_pinned_blocks_count_as_used_and_a_lost_decode_costs_the_timeout_and_a_tick() -> None:
    world = World(prefill_s=0.2)
    async with pair(world, timeout_s=1.0) as r:
        run, _ = await r.submit(r.job(PROMPT))
        await until(lambda: world.engines[0].active)
        r.decode.bus.disconnect()
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.RETRY
        assert world.engines[0].used == r.prefill.engine.pool.held == 3
        assert status(r.prefill).state.kv_used == 3
        assert status(r.prefill).kv.orphaned == 0
        began = asyncio.get_running_loop().time()
        await until(lambda: world.engines[0].used == 0)
        await until(lambda: r.prefill.engine.pool.held == 0)
        assert asyncio.get_running_loop().time() - began > 0.3, "no abort frees it, only the timeout"


async def test_a_dead_edge_costs_a_transfer_and_one_chunk() -> None:
    from schemas.state import Cause, Death
    from services.bus.typed import send

    world = World(transfer_s=0.3)
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=100))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        send(r.router, r.subjects.dead(r.edge.bus.process), Death(process=r.edge.bus.process, cause=Cause.KILLED))
        await until(lambda: free(world, r))
        assert len(world.consumed) == 1


async def test_a_worker_that_drains_passes_on_what_it_handed_off() -> None:
    world = World(prefill_s=0.1)
    async with pair(world) as r:
        run, _ = await r.submit(r.job(max_tokens=6))
        await until(lambda: world.engines[0].active)
        await drain(r.prefill, PATIENCE_S)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED


async def test_a_suspect_is_alone_when_its_handoff_begins() -> None:
    world = World()
    async with pair(world) as r:
        other, _ = await r.submit(r.job(max_tokens=200))
        await until(lambda: (2, State.DECODING) in r.edge.states(other))
        run, taken = await r.submit(msgspec.structs.replace(r.job(max_tokens=6), deaths=2))
        assert isinstance(taken, Accept)
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.ended(other)) == (State.FINISHED, State.RETRY)
        assert r.edge.tokens(run) == answer(PROMPT, 6)
        await until(lambda: free(world, r))


async def test_local_prefill_on_decode() -> None:
    world = World()
    async with pair(world) as r:
        run, taken = await r.submit_locally(r.job(PROMPT, max_tokens=7))
        assert isinstance(taken, Accept)
        await until(lambda: r.edge.ended(run))
        assert r.edge.tokens(run) == answer(PROMPT, 7)
        assert world.consumed == []


async def test_what_the_engine_cannot_compute_is_refused() -> None:
    world = World()
    async with pair(world) as r:
        _, taken = await r.submit(r.job([10**6]), reserve=False)
        assert isinstance(taken, Refuse)
        assert taken.reason == "invalid_value"
