"""Several choices through prefill and decode: handed over once, each as if alone, ended one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.control import Control, Position, Verb
from schemas.identity import run_id
from schemas.job import Choice, Job
from schemas.lifecycle import State
from schemas.placement import Accept
from schemas.reply import FinishReason, Frame
from services.bus.typed import send
from services.engine.scripted import Timing
from services.kv.holders import ChoiceHolder, RunHolder
from services.worker.worker import Worker
from tests.worker.rig import BLOCK_TOKENS, Rig, _random, rig, until


def job(r: Rig, n: int, *, choices: tuple[Choice, ...] = (), **options: Any) -> Job:
    one = r.job(**options)
    return msgspec.structs.replace(one, n=n, choices=choices or tuple(Choice(index=index) for index in range(n)))


async def submit(r: Rig, what: Job) -> int:
    """As a router does, with room for each choice."""
    run = run_id(_random)
    answer = await r.reserve(run, -(-what.prompt_tokens // BLOCK_TOKENS) + len(what.open_choices))
    assert answer.results[0].ok
    _, taken = await r.submit(what, reserve=False, run=run)
    assert isinstance(taken, Accept)
    return run


def tokens(r: Rig, run: int, *, hop: int | None = None) -> dict[int, list[int]]:
    """Each choice's tokens from index 0 or, in a resume, from where it stood."""
    by_place: dict[int, dict[int, int]] = {}
    for frame in r.edge.frames:
        if frame.run == run and hop in (None, frame.hop):
            for offset, token in enumerate(frame.tokens):
                known = by_place.setdefault(frame.choice, {}).setdefault(frame.index + offset, token)
                assert known == token, "what two hops both sent must agree"
    return {choice: [places[index] for index in sorted(places)] for choice, places in by_place.items()}


def frames(r: Rig, run: int, choice: int) -> list[Frame]:
    return [frame for frame in r.edge.frames if (frame.run, frame.choice) == (run, choice)]


def stop(r: Rig, run: int, choice: int, worker: Worker) -> None:
    of_job = next(event.job for event in r.edge.events if event.run == run)
    send(r.edge.bus, r.control_of(worker), Control(run=run, job=of_job, verb=Verb.CANCEL, choices=(choice,)))


async def alone(r: Rig, n: int, **options: Any) -> dict[int, list[int]]:
    """Choice i in a job whose other choices are done."""
    found: dict[int, list[int]] = {}
    for index in range(n):
        only = tuple(Choice(index=i, done=i != index) for i in range(n))
        run = await submit(r, job(r, n, choices=only, **options))
        await until(lambda run=run: r.edge.ended(run))
        found |= tokens(r, run)
    return found


@pytest.mark.parametrize("length", [1, 4, 7, 16, 33])
@pytest.mark.parametrize("cache", [True, False])
async def test_choices_are_handed_over_once_and_each_is_what_it_is_alone(length: int, cache: bool) -> None:
    prompt = list(range(20, 20 + length))
    async with rig(cache=cache) as r:
        run = await submit(r, job(r, 3, prompt=prompt, max_tokens=9))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED
        assert r.transfer.pulls == [-(-length // BLOCK_TOKENS)], "the prompt's blocks, once"
        assert tokens(r, run) == tokens(r, run, hop=2), "decode's stream alone is complete"
        assert [len(found) for found in tokens(r, run).values()] == [9, 9, 9]
        assert len([frame for frame in r.edge.frames if frame.run == run and frame.finish]) == 3
        assert tokens(r, run) == await alone(r, 3, prompt=prompt, max_tokens=9)
        here, _ = await r.submit_locally(job(r, 3, prompt=prompt, max_tokens=9))
        await until(lambda: r.edge.ended(here))
        assert tokens(r, here) == tokens(r, run)
        await until(r.clean)


async def test_decode_shares_the_prompt_and_counts_every_choice_as_a_slot() -> None:
    async with rig(decode=Timing(decode_step_s=0.05)) as r:
        free = r.decode.beats.credits().decode_slots
        run = await submit(r, job(r, 3, prompt=list(range(20, 34)), max_tokens=100))
        await until(lambda: [len(found) > 2 for found in tokens(r, run, hop=2).values()] == [True] * 3)
        held = [set(r.decode.engine.pool.blocks(ChoiceHolder(run, choice))) for choice in range(3)]
        assert len(set.intersection(*held)) == 3, "the full blocks of the prompt"
        assert r.decode.engine.pool.blocks(RunHolder(run)) == ()
        assert r.decode.beats.credits().decode_slots == free - 3
        stop(r, run, 1, r.decode)
        await until(lambda: not r.decode.engine.pool.blocks(ChoiceHolder(run, 1)))
        assert r.decode.beats.credits().decode_slots == free - 2
        r.edge.control(run, to=r.control_of(r.decode))
        await until(r.clean)
        await until(lambda: r.edge.ended(run) is State.CANCELLED)


async def test_a_choice_is_cancelled_alone_and_the_others_finish() -> None:
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        expected = await alone(r, 3, max_tokens=20)
        run = await submit(r, job(r, 3, max_tokens=20))
        await until(lambda: len(tokens(r, run, hop=2).get(0, ())) > 2)
        stop(r, run, 0, r.decode)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED
        found = tokens(r, run)
        assert len(found[0]) < 20
        assert found[0] == expected[0][: len(found[0])]
        assert (found[1], found[2]) == (expected[1], expected[2])
        assert not any(frame.finish for frame in frames(r, run, 0))
        await until(r.clean)


async def test_all_choices_cancelled_one_by_one_end_the_run() -> None:
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run = await submit(r, job(r, 2, max_tokens=200))
        await until(lambda: len(tokens(r, run, hop=2)) == 2)
        for choice in (1, 0):
            stop(r, run, choice, r.decode)
        await until(lambda: r.edge.ended(run))
        assert all(len(found) < 200 for found in tokens(r, run).values())
        await until(r.clean)


async def test_a_choice_is_cancelled_while_the_run_is_handed_over() -> None:
    async with rig(pull_block_s=0.1) as r:
        run = await submit(r, job(r, 2, max_tokens=6))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        for worker in (r.prefill, r.decode):
            stop(r, run, 0, worker)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED
        assert len(tokens(r, run)[1]) == 6
        assert len(tokens(r, run)[0]) == 1
        await until(r.clean)


async def test_a_cancel_of_a_choice_that_comes_before_its_run_does_not_cancel_the_run() -> None:
    async with rig() as r:
        run, what = run_id(_random), job(r, 2)
        control = Control(run=run, job=what.job, verb=Verb.CANCEL, choices=(0,))
        send(r.edge.bus, r.control_of(r.prefill), control)
        send(r.edge.bus, r.control_of(r.decode), control)
        await r.reserve(run, 6)
        _, taken = await r.submit(what, reserve=False, run=run)
        assert isinstance(taken, Accept)
        await until(lambda: r.edge.ended(run) is State.FINISHED)


async def test_a_resume_with_choices_done_and_at_different_places() -> None:
    async with rig() as r:
        whole = await alone(r, 4, max_tokens=12)
        had = (
            Choice(index=0, generated=tuple(whole[0][:5])),
            Choice(index=1, generated=tuple(whole[1]), done=True),
            Choice(index=2),
            Choice(index=3, generated=tuple(whole[3][:11])),
        )
        run = await submit(r, job(r, 4, choices=had, max_tokens=12))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FINISHED
        assert tokens(r, run) == {0: whole[0][5:], 2: whole[2], 3: whole[3][11:]}
        begun = tuple(Choice(index=index, generated=tuple(whole[index][:7])) for index in range(4))
        run = await submit(r, job(r, 4, choices=begun, max_tokens=12))
        await until(lambda: r.edge.ended(run))
        assert tokens(r, run) == {index: whole[index][7:] for index in range(4)}
        await until(r.clean)


async def test_a_choice_that_ended_with_its_first_token_is_told_by_decode_too() -> None:
    """Its finish must be in decode's replay ring, because decode is whom the edge asks."""
    async with rig() as r:
        probe = await submit(r, job(r, 2, max_tokens=3))
        await until(lambda: r.edge.ended(probe))
        ender = tokens(r, probe)[0][0]
        what = job(r, 2, max_tokens=3)
        what = msgspec.structs.replace(what, sampling=msgspec.structs.replace(what.sampling, stop_token_ids=(ender,)))
        run = await submit(r, what)
        await until(lambda: r.edge.ended(run))
        assert tokens(r, run, hop=2)[0] == [ender]
        assert [frame.finish for frame in frames(r, run, 0)] == [FinishReason.STOP] * 2
        assert len(tokens(r, run, hop=2)[1]) == 3
        before = len(r.edge.frames)
        r.edge.control(run, Verb.REPLAY, to=r.control_of(r.decode), positions=(Position(choice=0, index=0),))
        await until(lambda: len(r.edge.frames) > before)
        assert r.edge.frames[before].finish is FinishReason.STOP
        await until(r.clean)


async def test_logprobs_of_the_first_token_survive_the_handoff() -> None:
    async with rig() as r:
        what = job(r, 2, max_tokens=4)
        what = msgspec.structs.replace(what, sampling=msgspec.structs.replace(what.sampling, logprobs=2))
        run = await submit(r, what)
        await until(lambda: r.edge.ended(run))
        mine = [frame for frame in r.edge.frames if frame.run == run]
        assert {(frame.hop, frame.choice, frame.index) for frame in mine} >= {(hop, c, 0) for hop in (1, 2) for c in (0, 1)}
        for frame in mine:
            (logprob,) = frame.logprobs
            assert (logprob.token,) == frame.tokens
            assert len(logprob.top) == 2
