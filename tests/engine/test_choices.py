"""Several choices of one run: the prompt once, its blocks shared, each choice as if it were alone.

The scripted engine's KV is a fingerprint of all tokens before, so a block that is shared wrongly shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from schemas.errors import InvalidRequest
from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.engine.protocol import RunSpec
from services.engine.runner import Failed, Outcome
from services.engine.scheduler import Step
from services.kv.holders import ChoiceHolder, RunHolder
from tests.engine.fakes import EOS, Rig, count_up, several
from tests.engine.scripted import BLOCK, Scripted, job
from tests.waiting import until

PROMPTS = [list(range(20, 20 + length)) for length in (1, 3, 4, 5, 8, 17, 33)]


async def alone(prompt: Sequence[int], n: int) -> dict[int, list[int]]:
    """What each choice gets in a run of its own."""
    async with Scripted() as engine:
        for index in range(n):
            await engine.local(replace(job(index, prompt, ()), choices=(Choice(index=index),)))
        return {index: engine.tokens(index)[index] for index in range(n)}


async def hand_over(spec: RunSpec, *, reserved: int = 0, cache: bool = True) -> dict[int, list[int]]:
    """Prefill on one engine, decode on another, as a transfer does it."""
    async with Scripted(cache=cache) as there, Scripted(cache=cache) as here:
        first = await there.prefilled(spec)
        blocks = there.pool.blocks(RunHolder(spec.run))
        into = here.pool.allocate(RunHolder(spec.run), len(blocks) + reserved)
        for source, target in zip(blocks, into, strict=False):
            here.pool.view(target)[:] = there.pool.view(source)
        here.engine.decode(spec, first, cached_tokens=0, compute_s=0.0)
        assert not here.pool.blocks(RunHolder(spec.run)) or len(spec.choices) == 1
        await here.ended(spec.run)
        there.pool.release(RunHolder(spec.run))
        assert here.pool.held == there.pool.held == 0
        tokens = {token.choice: [token.token] for token in first}
        for choice, more in here.tokens(spec.run).items():
            tokens[choice] = tokens.get(choice, []) + more
        return tokens


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("cache", [True, False])
async def test_each_choice_is_what_it_is_alone(prompt: list[int], cache: bool) -> None:
    expected = await alone(prompt, 4)
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    async with Scripted(cache=cache) as engine:
        assert await engine.local(job(1, prompt, (), (), (), ())) == expected
        assert engine.pool.held == 0
    assert await hand_over(job(1, prompt, (), (), (), ()), cache=cache) == expected
    assert await hand_over(job(1, prompt, (), (), (), ()), reserved=4, cache=cache) == expected


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_a_resume_with_one_choice_done_goes_on_as_if_nothing_had_happened(prompt: list[int]) -> None:
    whole = await alone(prompt, 4)
    had = (tuple(whole[0][:3]), None, (), tuple(whole[3][:9]))
    expected = {0: whole[0][3:], 2: whole[2], 3: whole[3][9:]}
    async with Scripted() as engine:
        assert await engine.local(job(1, prompt, *had)) == expected
    assert await hand_over(job(1, prompt, *had)) == expected
    begun = (tuple(whole[0][:3]), tuple(whole[1][:1]))
    assert await hand_over(job(1, prompt, *begun)) == {0: whole[0][3:], 1: whole[1][1:]}
    one = (None, tuple(whole[1][:6]))
    assert await hand_over(job(1, prompt, *one)) == {1: whole[1][6:]}


async def test_equal_choices_share_what_they_compute() -> None:
    """At temperature 0 all choices are one; their full blocks become one, too."""
    async with Scripted(step_s=0.001) as engine:
        tokens = await engine.local(job(1, PROMPTS[3], (), (), (), temperature=0.0, max_tokens=21))
        assert tokens[0] == tokens[1] == tokens[2]
        assert engine.pool.held == 0
        assert engine.pool.cached == (5 + 20) // BLOCK


async def test_more_choices_than_the_batch_takes() -> None:
    expected = await alone(PROMPTS[3], 5)
    async with Scripted(max_batch=2) as engine:
        assert await engine.local(job(1, PROMPTS[3], (), (), (), (), ())) == expected


async def stand_still(rig: Rig) -> None:
    """Until the second step, the first one that decodes, is in progress."""

    def answer(step: Step) -> list[Outcome]:
        rig.runner.open.clear()
        rig.runner.answer = count_up
        return count_up(step)

    rig.runner.answer = answer
    rig.runner.open.set()
    await until(lambda: len(rig.runner.steps) == 2)
    assert rig.runner.in_step


async def test_the_prompt_is_computed_once_and_its_blocks_are_shared() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(several(1, range(10, 16), (), (), ()), then_decode=True)
        await stand_still(rig)
        chunks = [[(c.start, c.count) for c in step] for step in rig.runner.steps[:2]]
        assert chunks == [[(0, 6)], [(6, 1)] * 3]
        held = [rig.pool.blocks(ChoiceHolder(1, choice)) for choice in range(3)]
        assert not rig.pool.blocks(RunHolder(1))
        assert len(set.intersection(*map(set, held))) == 1, "the full block"
        assert rig.pool.held == 1 + 3 + 1, "the last one kept the tail, and has still the block it could have copied it to"
        rig.runner.open.set()
        await rig.ended(1)
        assert [rig.tokens(1, choice) for choice in range(3)] == [[16 + c, *range(17 + c, 21 + c)] for c in range(3)]
        assert rig.ends[1].state is State.FINISHED
        assert rig.pool.held == 0


async def test_prompt_blocks_and_one_a_choice_are_room_enough_to_begin() -> None:
    for length in (6, 8):
        async with Rig(blocks=2 + 3) as rig:
            rig.engine.prefill(several(1, range(10, 10 + length), (), (), (), max_tokens=3), then_decode=True)
            await rig.ended(1)
            assert rig.ends[1].state is State.FINISHED


async def test_a_choice_is_dropped_alone() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(several(1, range(10, 16), (), (), ()), then_decode=True)
        await stand_still(rig)
        rig.engine.cancel(1, [1])
        rig.engine.cancel(1, [7])
        rig.runner.open.set()
        await rig.ended(1)
        assert len(rig.tokens(1, 0)) == len(rig.tokens(1, 2)) == 5
        assert len(rig.tokens(1, 1)) < 5
        assert rig.ends[1].state is State.FINISHED
        assert rig.pool.held == 0


async def test_choices_are_dropped_before_the_prompt_is_computed() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(several(1, range(10, 16), (), (), ()), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.cancel(1, [0, 2])
        rig.runner.open.set()
        await rig.ended(1)
        assert {output.choice for output in rig.outputs} == {1}
        rig.runner.open.clear()
        rig.engine.prefill(several(2, range(10, 16), (), ()), then_decode=True)
        await until(lambda: rig.runner.in_step)
        rig.engine.cancel(2, [0])
        rig.engine.cancel(2, [1])
        rig.runner.open.set()
        await rig.ended(2)
        assert not [output for output in rig.outputs if output.run == 2]
        assert rig.pool.held == 0


async def test_the_last_choice_dropped_ends_the_run() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(several(1, range(10, 16), (), (), max_tokens=40), then_decode=True)
        await stand_still(rig)
        rig.engine.cancel(1, [1])
        rig.engine.cancel(1, [0])
        rig.runner.open.set()
        await rig.ended(1)
        assert rig.ends[1].state is State.FINISHED
        assert rig.pool.held == 0


async def test_a_cancel_ends_all_choices_once() -> None:
    async with Rig(paused=True) as rig:
        rig.engine.prefill(several(1, range(10, 16), (), (), (), max_tokens=40), then_decode=True)
        await stand_still(rig)
        rig.engine.cancel(1)
        rig.runner.open.set()
        await rig.ended(1)
        assert rig.ends[1].state is State.CANCELLED
        assert rig.pool.held == 0


async def test_choices_end_each_for_its_own_reason() -> None:
    async with Rig() as rig:
        rig.engine.prefill(several(1, (94, 95), (), (), max_tokens=4), then_decode=True)
        await rig.ended(1)
        assert rig.tokens(1, 0) == [96, 97, 98, EOS]
        assert rig.tokens(1, 1) == [97, 98, EOS]
        assert [o.finish for o in rig.outputs if o.finish] == [FinishReason.STOP, FinishReason.STOP]


async def test_choices_that_end_with_their_first_token() -> None:
    """One ends at once: decode is told of it and goes on with the other. All end at once: no handoff."""
    spec = several(1, (96, 97), (), (), max_tokens=4)
    async with Rig() as rig, Rig() as there:
        rig.engine.prefill(spec)
        await until(lambda: any(report.prefilled for report in rig.reports))
        first = tuple(FirstToken(choice=o.choice, index=0, token=o.token, finish=o.finish) for o in rig.outputs)
        assert [(token.token, token.finish) for token in first] == [(98, None), (EOS, FinishReason.STOP)]
        rig.pool.release(RunHolder(1))
        there.pool.allocate(RunHolder(1), 1)
        there.engine.decode(spec, first, cached_tokens=0, compute_s=0.0)
        await there.ended(1)
        assert (there.tokens(1, 0), there.tokens(1, 1)) == ([EOS], [])
        assert there.pool.held == 0
        there.pool.allocate(RunHolder(2), 1)
        with pytest.raises(InvalidRequest):
            there.engine.decode(replace(spec, run=2), first[1:], cached_tokens=0, compute_s=0.0)
        there.pool.release(RunHolder(2))
        rig.engine.prefill(replace(spec, run=3, sampling=Sampling(seed=1, max_tokens=1)))
        await rig.ended(3)
        assert not any(3 in report.prefilled for report in rig.reports)


async def test_a_choice_that_fails_ends_the_run() -> None:
    async with Rig(paused=True) as rig:

        def answer(step: Step) -> list[Outcome]:
            bad = {1}
            return [
                Failed("bad row") if chunk.sequence.choice in bad else outcome
                for chunk, outcome in zip(step.chunks, count_up(step), strict=True)
            ]

        rig.runner.answer = answer
        rig.engine.prefill(several(1, range(10, 16), (), (), ()), then_decode=True)
        rig.engine.prefill(several(2, range(10, 16), ()), then_decode=True)
        rig.runner.open.set()
        await rig.ended(1, 2)
        assert (rig.ends[1].state, rig.ends[1].reason) == (State.FAILED, "bad row")
        assert rig.ends[2].state is State.FINISHED
        assert rig.pool.held == 0


@pytest.mark.parametrize("seed", range(12))
async def test_any_mixture_gives_what_each_choice_gets_alone(seed: int) -> None:
    """Runs of random widths in a pool that is too small: preempted ones are resumed, choices are dropped at random."""
    random = Random(seed)
    prompts = [random.choice(PROMPTS) for _ in range(4)]
    widths = [random.choice((1, 2, 3, 5)) for _ in prompts]
    solo = [await alone(prompt, width) for prompt, width in zip(prompts, widths, strict=True)]
    async with Scripted(blocks=random.choice((24, 30, 60)), cache=random.random() < 0.7) as engine:
        got: list[dict[int, list[int]]] = [{choice: [] for choice in range(width)} for width in widths]
        dropped: list[set[int]] = [set() for _ in widths]
        todo, run = list(range(len(prompts))), 0
        while todo:
            which, run = todo.pop(0), run + 1
            had = [None if choice in dropped[which] or len(ids) == 11 else tuple(ids) for choice, ids in got[which].items()]
            if all(ids is None for ids in had):
                continue
            engine.engine.prefill(job(run, prompts[which], *had), then_decode=True)
            if random.random() < 0.4:
                victim = random.randrange(widths[which])
                await until(lambda run=run: engine.outputs(run) or engine.end(run))
                engine.engine.cancel(run, [victim])
                dropped[which].add(victim)
            await engine.ended(run)
            for choice, tokens in engine.tokens(run).items():
                got[which][choice] += tokens
            if engine.end(run) is State.RETRY:
                todo.append(which)
            engine.pool.check_integrity()
        for which, expected in enumerate(solo):
            for choice, tokens in got[which].items():
                assert tokens == expected[choice][: len(tokens)]
                assert choice in dropped[which] or len(tokens) == 11
        assert engine.pool.held == 0
