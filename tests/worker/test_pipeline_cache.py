"""Prefill and decode with prefix caches: a handoff moves only what decode lacks, and no token changes.

The scripted engines draw from what the blocks hold, so a block that is not the sequence's would yield other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from schemas.lifecycle import State
from schemas.placement import Accept
from services.engine.scripted import Timing
from services.kv.holders import ReservationHolder, RunHolder
from tests.worker.rig import BLOCK_TOKENS, Rig, rig, until

PROMPT = list(range(20, 33))


async def answer(r: Rig, prompt: Sequence[int], *, max_tokens: int = 6) -> list[int]:
    """The tokens of a job that went from prefill to decode."""
    run, _ = await r.submit(r.job(list(prompt), max_tokens=max_tokens))
    await until(lambda: r.edge.ended(run) and not len(r.prefill.runs))
    assert r.edge.ended(run) is State.FINISHED
    return r.edge.tokens(run)


async def uncached(prompt: Sequence[int], *, max_tokens: int = 6) -> list[int]:
    async with rig(cache=False) as r:
        tokens = await answer(r, prompt, max_tokens=max_tokens)
        assert r.transfer.pulls == [-(-len(prompt) // BLOCK_TOKENS)]
        assert r.decode.engine.pool.cached == 0
        return tokens


async def test_the_next_turn_of_a_chat_pulls_only_new_blocks():
    async with rig() as r:
        first = await answer(r, PROMPT, max_tokens=10)
        chat = [*PROMPT, *first, 40, 41, 42, 43]
        second = await answer(r, chat, max_tokens=10)
        # 27 tokens are 7 blocks. Decode has the 5 that are full of the first turn's 13 + 9 computed tokens.
        assert r.transfer.pulls == [4, 2]
        assert (first, second) == (await uncached(PROMPT, max_tokens=10), await uncached(chat, max_tokens=10))
        cached = [frame.cached_tokens for frame in r.edge.frames]
        assert (cached[0], cached[-1]) == (0, 12), "what prefill did not compute"
        await until(r.clean)


@pytest.mark.parametrize(("length", "pulled"), [(11, 1), (12, 0), (13, 1)])
async def test_the_same_prompt_again_pulls_the_tail_at_most(length: int, pulled: int):
    async with rig() as r:
        prompt = PROMPT[:length]
        assert await answer(r, prompt) == await answer(r, prompt) == await uncached(prompt)
        assert r.transfer.pulls[1] == pulled
        await until(r.clean)


async def test_blocks_that_decode_has_are_held_before_anything_is_awaited():
    """While the pull goes on, others take all the room there is: not these."""
    async with rig(decode_blocks=10, pull_block_s=0.1) as r:
        first = await answer(r, PROMPT)
        run, _ = await r.submit(r.job(PROMPT, max_tokens=6))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        pool = r.decode.engine.pool
        assert len(pool.blocks(RunHolder(run))) == 5
        taken = await r.reserve(99, pool.available)
        assert taken.results[0].ok
        assert not (await r.reserve(98, 1)).results[0].ok
        await until(lambda: r.edge.ended(run))
        assert (r.edge.ended(run), r.edge.tokens(run)) == (State.FINISHED, first)


async def test_room_that_was_reserved_for_what_decode_has_is_given_back():
    async with rig(pull_block_s=0.05) as r:
        await answer(r, PROMPT)
        run = 7
        await r.reserve(run, 5)
        reserved = r.decode.engine.pool.blocks(ReservationHolder(run))
        await r.submit(r.job(PROMPT), reserve=False, run=run)
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        pool = r.decode.engine.pool
        assert pool.blocks(RunHolder(run))[3:] == reserved[:2], "the tail, and a block to grow into"
        assert pool.held == 5
        await until(lambda: r.edge.ended(run))
        await until(r.clean)


async def test_runs_that_pull_the_same_together_end_up_sharing_it():
    async with rig(pull_block_s=0.02, decode=Timing(decode_step_s=0.02)) as r:
        runs = [(await r.submit(r.job(PROMPT, max_tokens=20)))[0] for _ in range(3)]
        await until(lambda: all((2, State.DECODING) in r.edge.states(run) for run in runs))
        held = [r.decode.engine.pool.blocks(RunHolder(run))[:3] for run in runs]
        assert held[0] == held[1] == held[2]
        await until(lambda: all(r.edge.ended(run) for run in runs))
        assert [r.edge.tokens(run) for run in runs] == [await uncached(PROMPT, max_tokens=20)] * 3
        await until(r.clean)


async def test_a_cancelled_pull_leaves_the_cache_as_it_was():
    async with rig(pull_block_s=0.2) as r:
        await answer(r, PROMPT)
        pool = r.decode.engine.pool
        cached = pool.cached
        run, _ = await r.submit(r.job(PROMPT))
        await until(lambda: (2, State.HANDING_OFF) in r.edge.states(run))
        r.edge.control(run, to=r.control_of(r.decode))
        await until(r.clean)
        assert pool.cached == cached


async def test_a_local_prefill_uses_what_handoffs_brought():
    async with rig() as r:
        apart = await answer(r, PROMPT)
        run, _ = await r.submit_locally(r.job(PROMPT, max_tokens=6))
        await until(lambda: r.edge.ended(run))
        assert r.edge.tokens(run) == apart
        assert r.edge.frames[-1].cached_tokens == 12
        await until(r.clean)


async def test_a_local_prefill_of_a_small_tail_goes_in_beside_a_running_batch():
    async with rig(decode=Timing(prefill_token_s=0.005, decode_step_s=0.005)) as r:
        first = await answer(r, PROMPT, max_tokens=10)
        running = [(await r.submit(r.job([50 + n, 51, 52], max_tokens=60)))[0] for n in range(3)]
        await until(lambda: all((2, State.DECODING) in r.edge.states(run) for run in running))
        chat = [*PROMPT, *first, 40, 41, 42]
        here, taken = await r.submit_locally(r.job(chat, max_tokens=4))
        assert isinstance(taken, Accept)
        await until(lambda: r.edge.ended(here))
        assert not any(r.edge.ended(run) for run in running), "nobody waited for a prompt, nor it for them"
        frames = [frame for frame in r.edge.frames if frame.run == here]
        assert {(frame.hop, frame.cached_tokens) for frame in frames} == {(2, 20)}
        assert r.edge.tokens(here) == await uncached(chat, max_tokens=4)
        await until(lambda: all(r.edge.ended(run) is State.FINISHED for run in running))
        assert r.edge.tokens(running[0]) == await uncached([50, 51, 52], max_tokens=60)
        await until(r.clean)


async def test_what_is_cached_does_not_count_against_the_queue():
    """Two prompts of more than a step each: only their tails are work, so both are taken."""
    async with rig(decode=Timing(prefill_token_s=0.02)) as r:
        for prompt in (range(20, 100), range(120, 200)):
            await answer(r, list(prompt), max_tokens=2)
        taken = [(await r.submit_locally(r.job([*prompt, 9], max_tokens=2))) for prompt in (range(20, 100), range(120, 200))]
        assert all(isinstance(said, Accept) for _, said in taken)
        await until(lambda: all(r.edge.ended(run) for run, _ in taken))
        await until(r.clean)


async def test_random_chats_under_eviction_pressure():
    random = Random(3)
    chats = [[20, 21, 22, 23, 24, random.randrange(30, 40), random.randrange(30, 40)] for _ in range(5)]
    async with rig(decode_blocks=24) as r:
        for _ in range(30):
            chat = random.choice(chats)
            tokens = await answer(r, chat)
            assert tokens == await uncached(chat)
            chat += [*tokens, random.randrange(30, 40)]
            del chat[60:]
        await until(r.clean)
        pool = r.decode.engine.pool
        assert max(pool.generation(block) for block in range(24)) > 2, "there was pressure"
        assert min(r.transfer.pulls) < 3
