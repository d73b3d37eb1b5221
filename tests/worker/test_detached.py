"""Detached jobs at a worker: they outlive their edge, go over to another one, and end when none holds them."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest

from schemas.codec import decode, encode
from schemas.control import Control, Position, Verb
from schemas.errors import NoResponders, UnreadableMessage
from schemas.identity import process_id
from schemas.job import Job
from schemas.lifecycle import State
from schemas.reply import Digest
from schemas.state import Cause, Death
from services.bus.memory import MemoryBus
from services.bus.typed import Refusals, ask, send
from services.clock import ManualClock
from services.engine.scripted import Timing
from services.worker.detached import Attendance
from services.worker.runs import UNATTENDED_S
from tests.waiting import PATIENCE_S
from tests.worker.rig import EdgeDouble, Rig, rig, until

SLOW = Timing(decode_step_s=0.02)
SECOND = process_id("e2", 1_700_000_000.0, Random(3))


def detached(r: Rig, tokens: int = 60) -> Job:
    return msgspec.structs.replace(r.job(max_tokens=tokens), detached=True)


async def second_edge(r: Rig) -> EdgeDouble:
    edge = EdgeDouble(MemoryBus(r.broker, SECOND))
    await edge.bus.subscribe(r.subjects.reply(SECOND), edge.on_reply)
    return edge


def taking_over(r: Rig, job: Job, index: int = 0) -> Control:
    positions = (Position(choice=0, index=index),)
    return Control(run=0, job=job.job, verb=Verb.ATTACH, positions=positions, reply_to=r.subjects.reply(SECOND), edge=SECOND)


async def adopt(r: Rig, edge: EdgeDouble, control: Control) -> Digest:
    """What the owner answers, once it listens."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask(edge.bus, r.subjects.attach(control.job), control, Digest, timeout=PATIENCE_S)
            except NoResponders:
                await asyncio.sleep(0.005)


async def test_another_edge_takes_over_from_an_index() -> None:
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit(job := detached(r))
        await until(lambda: len(r.edge.tokens(run)) > 10)
        send(r.router, r.subjects.dead(job.edge), Death(process=job.edge, cause=Cause.KILLED))
        edge = await second_edge(r)
        digest = await adopt(r, edge, taking_over(r, job, index=5))
        (found,) = digest.runs
        assert (digest.process, found.run, found.job, found.attempt, found.hop) == (r.decode.bus.process, run, job.job, 1, 2)
        await until(lambda: edge.ended(run))
        assert edge.ended(run) is State.FINISHED
        assert sorted(frame.index for frame in edge.frames) == list(range(5, 60))
        assert edge.controls[run] == r.control_of(r.decode)
        await until(lambda: any(entry.run == run for digest in edge.digests for entry in digest.runs))
        before = len(r.edge.frames)
        assert before < 60
        assert r.edge.ended(run) is None


async def test_its_dead_edge_alone_stops_nothing_but_what_is_not_detached() -> None:
    async with rig(decode=SLOW) as r:
        kept, _ = await r.submit(job := detached(r))
        dropped, _ = await r.submit(r.job(max_tokens=60))
        await until(lambda: r.edge.tokens(kept) and r.edge.tokens(dropped))
        send(r.router, r.subjects.dead(job.edge), Death(process=job.edge, cause=Cause.KILLED))
        await until(lambda: r.edge.ended(dropped) and r.edge.ended(kept))
        assert (r.edge.ended(dropped), r.edge.ended(kept)) == (State.CANCELLED, State.FINISHED)


async def test_in_a_handoff_both_sides_go_over() -> None:
    async with rig(pull_block_s=0.1) as r:
        run, _ = await r.submit(job := detached(r, tokens=10))
        await until(lambda: r.decode.runs.get(run))
        edge = await second_edge(r)
        await adopt(r, edge, taking_over(r, job))
        await until(lambda: edge.ended(run))
        assert r.edge.ended(run) is None
        assert len(edge.tokens(run)) == 10
        undisturbed, _ = await r.submit(detached(r, tokens=10))
        await until(lambda: r.edge.ended(undisturbed))
        assert edge.tokens(run) == r.edge.tokens(undisturbed)


async def test_a_handoff_under_way_is_followed() -> None:
    """Decode was asked before the edge took over, and says *owned* to the old one; prefill tells it."""
    async with rig(pull_block_s=0.1) as r:
        run, _ = await r.submit(job := detached(r, tokens=10))
        await until(lambda: r.decode.runs.get(run))
        edge = await second_edge(r)
        control = msgspec.structs.replace(taking_over(r, job), run=run)
        send(edge.bus, r.control_of(r.prefill), control)
        await until(lambda: edge.ended(run))
        assert len(edge.tokens(run)) == 10


async def test_a_handoff_goes_on_when_the_edge_is_dead() -> None:
    async with rig(prefill=Timing(prefill_token_s=0.02)) as r:
        run, _ = await r.submit(job := detached(r, tokens=10))
        for worker in (r.prefill, r.decode):
            worker.edges.died(job.edge)
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run)[-1] == (2, State.FINISHED)
        assert len(r.edge.tokens(run)) == 10


async def test_what_ended_is_still_told_to_who_comes_late() -> None:
    async with rig() as r:
        run, _ = await r.submit(job := detached(r, tokens=6))
        await until(lambda: r.edge.ended(run))
        edge = await second_edge(r)
        digest = await adopt(r, edge, taking_over(r, job))
        assert digest.runs[0].state is State.FINISHED
        await until(lambda: edge.ended(run))
        assert edge.tokens(run) == r.edge.tokens(run)


async def test_a_replay_goes_where_it_was_asked_for_and_nothing_else_does() -> None:
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit(job := detached(r, tokens=40))
        await until(lambda: len(r.edge.tokens(run)) > 5)
        edge = await second_edge(r)
        await adopt(r, edge, msgspec.structs.replace(taking_over(r, job), verb=Verb.REPLAY))
        await until(lambda: r.edge.ended(run))
        assert len(r.edge.tokens(run)) == 40
        assert 5 < len(edge.tokens(run)) < 40


async def test_nobody_listens_for_a_job_that_is_not_detached() -> None:
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit(job := r.job(max_tokens=40))
        await until(lambda: r.edge.ended(run))
        with pytest.raises(NoResponders):
            await ask(r.router, r.subjects.attach(job.job), taking_over(r, job), Digest, timeout=PATIENCE_S)


async def test_a_run_that_no_edge_attends_to_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.detached.EVERY_S", 600.0)  # the worker's own attendance knows another clock
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit(job := detached(r, tokens=200))
        await until(lambda: len(r.edge.tokens(run)) > 3)
        attendance, clock = _attendance(r)
        clock.advance(UNATTENDED_S - 1)
        attendance.look()
        send(r.edge.bus, r.control_of(r.decode), Control(run=run, job=job.job, verb=Verb.ATTACH, edge=job.edge))
        decoding = r.decode.runs.get(run)
        assert decoding is not None
        await until(lambda: decoding.unattended_s == 0.0)
        send(r.edge.bus, r.control_of(r.decode), Control(run=run, job=job.job, verb=Verb.ATTACH, edge=SECOND))  # not its edge
        clock.advance(UNATTENDED_S - 1)
        attendance.look()
        assert not decoding.stopping
        clock.advance(2)
        attendance.look()
        await until(lambda: r.edge.ended(run))
        assert r.edge.reason(run) == "unattended"


async def test_while_the_bus_is_away_attendance_stands_still() -> None:
    async with rig(decode=SLOW) as r:
        run, _ = await r.submit(detached(r, tokens=200))
        await until(lambda: len(r.edge.tokens(run)) > 3)
        attendance, clock = _attendance(r)
        r.decode.bus.disconnect()
        clock.advance(60)
        attendance.look()
        r.decode.bus.reconnect()
        clock.advance(10)
        attendance.look()  # it came back a moment ago
        decoding = r.decode.runs.get(run)
        assert decoding is not None
        assert decoding.unattended_s < UNATTENDED_S
        assert not decoding.stopping


@pytest.mark.parametrize("wrong", [{"reply_to": "hr.>"}, {"edge": "me"}])
def test_an_attach_names_a_subject_and_a_process(wrong: dict[str, str]) -> None:
    good = Control(run=0, job="0" * 32, verb=Verb.ATTACH, reply_to="hr.reply.x", edge=SECOND)
    assert decode(encode(good), Control) == good
    with pytest.raises(UnreadableMessage):
        decode(msgspec.msgpack.encode({**msgspec.structs.asdict(good), **wrong}), Control)


def _attendance(r: Rig) -> tuple[Attendance, ManualClock]:
    """Decode's, by a clock that stands still; the worker has it from now on."""
    r.decode.clock = clock = ManualClock()
    return Attendance(r.decode, Refusals()), clock
