"""Log-probabilities of a prompt from the engine to its edge: in pieces, before the first token, replayed by who computed them."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.control import Position, Verb
from schemas.job import Job
from schemas.reply import PROMPT, Frame
from services.engine.scheduler import SCORED
from tests.worker.rig import Rig, rig, until

PROMPT_IDS = [20 + at % 250 for at in range(3 * SCORED + 7)]


def asking(r: Rig, alternatives: int = 3) -> Job:
    job = r.job(PROMPT_IDS)
    return replace(job, sampling=replace(job.sampling, prompt_logprobs=alternatives))


def of_prompt(r: Rig, run: int) -> list[Frame]:
    return [frame for frame in r.edge.frames if frame.run == run and frame.choice == PROMPT]


def check(frames: list[Frame], first: int = 1) -> None:
    assert [token for frame in frames for token in frame.tokens] == PROMPT_IDS[first:]
    assert [frame.index for frame in frames] == [first + sum(len(f.tokens) for f in frames[:at]) for at in range(len(frames))]
    assert all(len(frame.logprobs) == len(frame.tokens) <= SCORED for frame in frames)


async def test_through_a_handoff():
    async with rig() as r:
        plain, _ = await r.submit(r.job(PROMPT_IDS))
        await until(lambda: r.edge.ended(plain))
        run, _ = await r.submit(asking(r))
        await until(lambda: r.edge.ended(run))
        check(of_prompt(r, run))
        order = [frame.choice for frame in r.edge.frames if frame.run == run]
        assert order == sorted(order), "the prompt comes first"
        assert {frame.hop for frame in of_prompt(r, run)} == {1}, "decode has nothing of it, and repeats nothing"
        assert r.edge.tokens(run) == r.edge.tokens(plain)
        assert [f.cached_tokens for f in r.edge.frames if f.run == run][-1] == 0, "the cache was passed by"
        after, _ = await r.submit(r.job(PROMPT_IDS))
        await until(lambda: r.edge.ended(after))
        assert [f.cached_tokens for f in r.edge.frames if f.run == after][-1] > 0
        await until(r.clean)


async def test_prefill_repeats_it_after_the_handoff():
    async with rig() as r:
        run, _ = await r.submit(asking(r))
        await until(lambda: r.edge.ended(run))
        r.edge.frames.clear()
        positions = (Position(choice=PROMPT, index=1 + SCORED),)
        r.edge.control(run, Verb.REPLAY, to=r.control_of(r.prefill), positions=positions)
        await until(lambda: len(of_prompt(r, run)) == 3)
        check(of_prompt(r, run), 1 + SCORED)


async def test_prefilled_by_decode():
    async with rig() as r:
        run, _ = await r.submit_locally(asking(r, 0))
        await until(lambda: r.edge.ended(run))
        check(of_prompt(r, run))
        assert len(r.edge.tokens(run)) == 8
        await until(r.clean)
