"""Grammars through prefill and decode: a handoff and a resume change nothing, a bad one fails its own run with a code."""

from __future__ import annotations

import re

import msgspec

from schemas.job import Choice, Grammar, Job
from schemas.lifecycle import State
from schemas.placement import Accept, Refuse
from schemas.reply import FinishReason
from services.engine.scripted import Timing
from services.worker.draining import drain
from tests.text.tiny import tiny_tokenizer
from tests.worker.rig import Rig, rig, until

LIST = Grammar(kind="regex", source="(red|green|blue)(, (red|green|blue)){4,12}")


def job(r: Rig, grammar: Grammar, *, generated: tuple[int, ...] = (), seed: int = 1) -> Job:
    plain = r.job(max_tokens=100, seed=seed)
    sampling = msgspec.structs.replace(plain.sampling, grammar=grammar)
    return msgspec.structs.replace(plain, sampling=sampling, choices=(Choice(index=0, generated=generated),))


def finish(r: Rig, run: int) -> FinishReason | None:
    return next((frame.finish for frame in r.edge.frames if frame.run == run and frame.finish), None)


async def test_a_handoff_changes_no_token() -> None:
    async with rig() as r:
        for seed in range(5):
            apart, answer = await r.submit(job(r, LIST, seed=seed))
            assert isinstance(answer, Accept)
            here, _ = await r.submit_locally(job(r, LIST, seed=seed))
            await until(lambda runs=(apart, here): all(r.edge.ended(run) for run in runs))
            assert r.edge.tokens(apart) == r.edge.tokens(here)
            assert re.fullmatch(LIST.source, tiny_tokenizer().decode(r.edge.tokens(apart)))
            assert finish(r, apart) is FinishReason.STOP
        await until(r.clean)


async def test_an_answer_that_is_complete_with_its_first_token_needs_no_handoff() -> None:
    async with rig() as r:
        run, _ = await r.submit(job(r, Grammar(kind="regex", source="[ab]")))
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [(1, State.PREFILLING), (1, State.FINISHED)]
        assert finish(r, run) is FinishReason.STOP
        await until(r.clean)


async def test_what_a_drained_worker_left_goes_on_with_the_same_tokens() -> None:
    async with rig() as r:
        whole, _ = await r.submit(job(r, LIST))
        await until(lambda: r.edge.ended(whole))
        expected = r.edge.tokens(whole)
    async with rig(decode=Timing(decode_step_s=0.01)) as r:
        cut, _ = await r.submit(job(r, LIST))
        await until(lambda: sum(frame.run == cut for frame in r.edge.frames) > 6)
        await drain(r.decode, 0.0)
        await until(lambda: r.edge.ended(cut))
        assert r.edge.ended(cut) is State.RETRY
        had = r.edge.tokens(cut)
    assert expected[: len(had)] == had
    async with rig() as r:
        resumed = job(r, LIST, generated=tuple(had))
        run, answer = await r.submit(resumed)
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run))
        frames = {frame.index: frame.tokens for frame in r.edge.frames if frame.run == run}
        assert [token for index in sorted(frames) for token in frames[index]] == expected[len(had) :]
        assert finish(r, run) is FinishReason.STOP


async def test_a_bad_grammar_fails_its_own_run_with_a_code() -> None:
    """The edge refuses these; an edge of another version may not."""
    async with rig() as r:
        bad, _ = await r.submit(job(r, Grammar(kind="regex", source="(?<=x)*")))
        good, _ = await r.submit(job(r, LIST))
        await until(lambda: r.edge.ended(bad) and r.edge.ended(good))
        event = next(event for event in r.edge.events if event.run == bad and event.state.terminal)
        assert (event.state, event.error_code) == (State.FAILED, "invalid_value")
        assert r.edge.ended(good) is State.FINISHED
        await until(r.clean)


async def test_a_kind_that_the_engine_does_not_have_is_refused() -> None:
    async with rig() as r:
        _, answer = await r.submit(job(r, Grammar(kind="xml", source="<a/>")))
        assert isinstance(answer, Refuse)
        assert answer.reason == "unsupported_parameter"
