"""Prefill fetches from decode what a chat's last turns left in its cache; whatever fails, the same tokens come, later.

The scripted engines draw from what the blocks hold, so a block that is not the sequence's would yield other tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from schemas.handoff import BlockRef, Offer, OfferRequest, Ticket
from schemas.lifecycle import State
from schemas.placement import Accept, CachedBlocks, Refuse
from services.bus.typed import ask
from services.engine.protocol import RunSpec
from services.engine.scripted import Timing
from services.kv.holders import LoanHolder, RunHolder
from services.kv.pool import BlockPool
from services.kv.transfer.interface import Fetched, TransferClient, TransferLimits
from services.prefill.fetching import time_limit
from tests.waiting import PATIENCE_S
from tests.worker.rig import BLOCKS, Carrier, Rig, rig, until

PROMPT = list(range(20, 33))
SLOW = Timing(prefill_token_s=0.005)


def chat_after(tokens: Sequence[int]) -> list[int]:
    """27 tokens, of which the first turn left 22 in decode's cache: 5 blocks."""
    return [*PROMPT, *tokens, 40, 41, 42, 43]


def forget(pool: BlockPool) -> None:
    """What happens to a cache when others need the room."""
    pool.allocate(RunHolder(1), pool.available)
    pool.release(RunHolder(1))
    assert not pool.cached


async def first_turn(r: Rig) -> list[int]:
    run, _ = await r.submit(r.job(PROMPT, max_tokens=10))
    await until(lambda: r.edge.ended(run) and not len(r.prefill.runs))
    return r.edge.tokens(run)


async def place(r: Rig, prompt: list[int], blocks: int = 6, *, seed: int = 1) -> int:
    cached = CachedBlocks(process=r.decode.bus.process, blocks=blocks)
    run, answer = await r.submit(r.job(prompt, max_tokens=10, seed=seed), fetch=cached)
    assert isinstance(answer, Accept), answer
    return run


async def finish(r: Rig, run: int) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were cached."""
    await until(lambda: r.edge.ended(run) and not len(r.prefill.runs))
    assert r.edge.ended(run) is State.FINISHED
    return r.edge.tokens(run), next(frame.cached_tokens for frame in r.edge.frames if frame.run == run)


async def uncached(prompt: list[int]) -> list[int]:
    async with rig(cache=False) as r:
        run, _ = await r.submit(r.job(prompt, max_tokens=10))
        return (await finish(r, run))[0]


@pytest.mark.parametrize("carrier", ["memory", "shm", "tcp"])
async def test_the_next_turn_of_a_chat_is_fetched_and_not_computed(carrier: Carrier) -> None:
    async with rig(carrier=carrier) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        tokens, cached = await finish(r, await place(r, chat))
        assert (r.fetches.pulls, cached) == ([5], 20)
        assert r.transfer.pulls == [4, 2], "decode still pulls what it lacks and no more"
        assert tokens == await uncached(chat)
        await until(r.clean)
        assert r.prefill.engine.pool.cached == 6, "what was fetched is cached like what is computed"


async def test_only_what_is_missing_is_fetched() -> None:
    async with rig() as r:
        chat = chat_after(await first_turn(r))
        assert (await finish(r, await place(r, chat)))[1] == 20
        assert r.fetches.pulls == [2]
        await until(r.clean)


async def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    async with rig() as r:
        chat = chat_after(await first_turn(r))[:20]
        forget(r.prefill.engine.pool)
        tokens, cached = await finish(r, await place(r, chat))
        assert (r.fetches.pulls, cached) == ([4], 16)
        assert tokens == await uncached(chat)
        await until(r.clean)


@pytest.mark.parametrize("why", ["had", "own", "prompt_logprobs", "none"])
async def test_nobody_is_asked_for_what_is_of_no_use(why: str) -> None:
    async with rig() as r:
        await first_turn(r)
        job = r.job(PROMPT, max_tokens=2)
        if why == "prompt_logprobs":
            forget(r.prefill.engine.pool)
            job = msgspec.structs.replace(job, sampling=msgspec.structs.replace(job.sampling, prompt_logprobs=1))
        process = (r.prefill if why == "own" else r.decode).bus.process
        run, _ = await r.submit(job, fetch=CachedBlocks(process=process, blocks=0 if why == "none" else 3))
        await until(lambda: r.edge.ended(run))
        assert not r.fetches.pulls
        await until(r.clean)


class Spoiled:
    """A `TransferClient` whose source changes while it reads."""

    def __init__(self, client: TransferClient, pool: BlockPool) -> None:
        self._client = client
        self._pool = pool

    async def fetch(self, ticket: Ticket, blocks: Sequence[BlockRef], *args: Any, **options: Any) -> Fetched:
        view = self._pool.view(blocks[2].slot)
        self._pool.checksum(blocks[2].slot)
        view[9] ^= 4
        try:
            return await self._client.fetch(ticket, blocks, *args, **options)
        finally:
            view[9] ^= 4


class Refused:
    """A `TransferClient` that presents another ticket, or asks for blocks of another kind."""

    def __init__(self, client: TransferClient, *, token: bytes | None = None, kv_compat: str = "k") -> None:
        self._client = client
        self._token = token
        self._kv_compat = kv_compat

    async def fetch(self, ticket: Ticket, *args: Any, **options: Any) -> Fetched:
        ticket = msgspec.structs.replace(ticket, token=self._token or ticket.token)
        return await self._client.fetch(ticket, *args, **{**options, "kv_compat": self._kv_compat})


@pytest.mark.parametrize("carrier", ["memory", "shm", "tcp"])
@pytest.mark.parametrize("fault", ["flipped bit", "stranger's ticket", "other kv_compat", "evicted", "no lender", "gone"])
async def test_a_fetch_that_fails_costs_time_and_no_token(fault: str, carrier: Carrier) -> None:
    async with rig(carrier=carrier, limits=TransferLimits(present_s=0.3)) as r:
        chat = chat_after(await first_turn(r))
        expected = await uncached(chat)
        forget(r.prefill.engine.pool)
        client = r.fetches.client
        match fault:
            case "flipped bit":
                r.fetches.client = Spoiled(client, r.decode.engine.pool)
            case "stranger's ticket":
                r.fetches.client = Refused(client, token=bytes(24))
            case "other kv_compat":
                r.fetches.client = Refused(client, kv_compat="other")
            case "evicted":
                forget(r.decode.engine.pool)
            case "gone":
                await r.servers["d1"].close()
        run, answer = await r.submit(r.job(chat, max_tokens=10), fetch=CachedBlocks(process=_lender(r, fault), blocks=6))
        assert isinstance(answer, Accept)
        assert await finish(r, run) == (expected, 0)
        await until(r.clean)


def _lender(r: Rig, fault: str) -> str:
    return "d9-0k3v9x00abcde" if fault == "no lender" else r.decode.bus.process


async def test_a_lender_that_says_nothing_is_given_up() -> None:
    async with rig() as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        silent, asked = "d9-0k3v9x00abcde", []
        await r.router.subscribe(r.subjects.decode_offer(silent), asked.append)
        run, _ = await r.submit(r.job(chat, max_tokens=10), fetch=CachedBlocks(process=silent, blocks=6))
        assert (await finish(r, run))[1] == 0
        assert len(asked) == 1
        assert not r.fetches.pulls


async def test_a_transfer_that_stands_still_is_given_up() -> None:
    async with rig(fetch_block_s=30.0) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        tokens, cached = await finish(r, await place(r, chat))
        assert (r.fetches.pulls, cached) == ([5], 0)
        assert tokens == await uncached(chat)
        await until(r.clean)


async def test_the_copy_into_the_engine_is_none_of_the_transfers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no network: what came is used, however long the device takes for it."""

    async def slow(*_: object) -> None:
        await asyncio.sleep(2 * time_limit(0))

    async with rig() as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        monkeypatch.setattr(r.prefill.engine.pool, "stage_in", slow)
        tokens, cached = await finish(r, await place(r, chat))
        assert (r.fetches.pulls, cached) == ([5], 20)
        assert tokens == await uncached(chat)


def test_a_transfer_may_take_the_longer_the_more_it_moves() -> None:
    assert time_limit(0) < time_limit(10**8) < 1.0 < time_limit(10**9) < 5.0


@pytest.mark.parametrize("stage", ["asked", "pulling"])
async def test_a_cancel_ends_a_fetch_at_once(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.prefill.fetching.LEAST_S", 60.0)
    async with rig(fetch_block_s=30.0, limits=TransferLimits(present_s=0.3)) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        run = await place(r, chat)
        if stage == "pulling":
            await until(lambda: r.fetches.pulls)
            assert LoanHolder(run) in r.decode.engine.pool.holders
        r.edge.control(run, to=r.control_of(r.prefill))
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.CANCELLED
        await until(r.clean)


async def test_a_prefill_worker_that_ends_while_it_fetches_frees_the_loan() -> None:
    async with rig(fetch_block_s=30.0) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        run = await place(r, chat)
        await until(lambda: r.fetches.pulls)
        await r.prefill.close()
        await until(lambda: LoanHolder(run) not in r.decode.engine.pool.holders)
        assert r.decode.engine.pool.leases_lapsed == 0
        assert r.prefill.engine.pool.held == 0


async def test_other_prompts_are_computed_while_one_is_fetched() -> None:
    async with rig(fetch_block_s=0.05) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        fetching = await place(r, chat)
        other, _ = await r.submit(r.job([50, 51, 52], max_tokens=1))
        await until(lambda: r.edge.ended(other))
        assert not r.edge.ended(fetching)
        assert await finish(r, fetching) == (await uncached(chat), 20)


async def test_what_is_being_fetched_is_counted_as_queued() -> None:
    """These prompts together are more than one step takes: the second is refused while the first has not reached the engine."""
    silent, asked = "d9-0k3v9x00abcde", []
    async with rig() as r:
        await r.router.subscribe(r.subjects.decode_offer(silent), asked.append)
        long, before = list(range(20, 70)), r.prefill.beats.credits().prefill_tokens
        run, _ = await r.submit(r.job(long), fetch=CachedBlocks(process=silent, blocks=5))
        assert r.prefill.beats.credits().prefill_tokens == before - 30, "what is to be fetched is no work"
        _, answer = await r.submit(r.job(long[::-1]))
        assert isinstance(answer, Refuse)
        assert answer.reason == "no_credit"
        await until(lambda: r.edge.ended(run))


async def test_a_prompt_that_has_no_room_is_refused_before_anything_is_asked() -> None:
    async with rig() as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        r.prefill.engine.pool.allocate(RunHolder(2), BLOCKS - 3)
        cached = CachedBlocks(process=r.decode.bus.process, blocks=6)
        _, answer = await r.submit(r.job(chat, max_tokens=10), fetch=cached)
        assert isinstance(answer, Refuse)
        assert not r.fetches.pulls
        r.prefill.engine.pool.release(RunHolder(2))
        await until(r.clean)


async def test_a_job_the_engine_cannot_do_is_refused_and_not_fetched() -> None:
    async with rig() as r:
        await first_turn(r)
        forget(r.prefill.engine.pool)
        _, answer = await r.submit(r.job([*PROMPT, 5000]), fetch=CachedBlocks(process=r.decode.bus.process, blocks=3))
        assert isinstance(answer, Refuse)
        await until(r.clean)


async def test_prompts_that_fetch_the_same_together_end_up_sharing_it() -> None:
    async with rig(fetch_block_s=0.02, prefill=SLOW) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        runs = [await place(r, chat) for _ in range(3)]
        assert [await finish(r, run) for run in runs] == [(await uncached(chat), 20)] * 3
        await until(r.clean)
        assert r.prefill.engine.pool.cached == 6


async def test_choices_and_resumes_fetch_too() -> None:
    async with rig() as r:
        tokens = await first_turn(r)
        forget(r.prefill.engine.pool)
        choice = msgspec.structs.replace(r.job(PROMPT).choices[0], generated=tuple(tokens[:9]))
        job = msgspec.structs.replace(r.job(PROMPT, max_tokens=12), choices=(choice,), attempt=2, resume=True)
        run, _ = await r.submit(job, fetch=CachedBlocks(process=r.decode.bus.process, blocks=5))
        await until(lambda: r.edge.ended(run))
        frames = [frame for frame in r.edge.frames if frame.run == run]
        assert r.fetches.pulls == [5], "22 tokens of prompt and generated"
        assert frames[0].index == 9
        assert frames[0].tokens == (tokens[9],)
        assert frames[0].cached_tokens == len(PROMPT), "of the prompt, not of what was generated"
        await until(r.clean)


# the lender's side


async def request(r: Rig, run: int, tokens: list[int], *, have: int = 0, kv_compat: str = "k") -> Offer:
    spec = RunSpec.of(run, r.job(tokens))
    wanted = OfferRequest(run=run, kv_compat=kv_compat, hashes=tuple(spec.hashes(r.decode.engine.info)), have=have)
    return await ask(r.router, r.subjects.decode_offer(r.decode.bus.process), wanted, Offer, timeout=PATIENCE_S)


async def test_decode_lends_the_longest_beginning_it_has() -> None:
    async with rig(limits=TransferLimits(present_s=0.2)) as r:
        await first_turn(r)
        offer = await request(r, 5, [*PROMPT[:12], 90, 91, 92, 93, 94])
        assert offer.ticket is not None
        assert len(offer.blocks) == 3
        pool = r.decode.engine.pool
        assert pool.blocks(LoanHolder(5)) == tuple(block.slot for block in offer.blocks)
        assert pool.held == 3
        await until(r.clean)  # nobody came for them


@pytest.mark.parametrize("why", ["other_kv", "not_cached", "duplicate", "nothing new"])
async def test_decode_refuses(why: str) -> None:
    async with rig(limits=TransferLimits(present_s=0.2)) as r:
        await first_turn(r)
        if why == "duplicate":
            await request(r, 5, PROMPT)
        refused = {
            "other_kv": request(r, 5, PROMPT, kv_compat="other"),
            "not_cached": request(r, 5, [1, 2, 3, 4, 5]),
            "duplicate": request(r, 5, PROMPT),
            "nothing new": request(r, 5, PROMPT, have=3),
        }
        offers = {name: await asking if name == why else asking.close() for name, asking in refused.items()}
        offer = offers[why]
        assert offer is not None
        assert offer.ticket is None
        assert offer.reason == ("not_cached" if why == "nothing new" else why)
        await until(r.clean)


async def test_a_loan_is_not_evicted_while_it_is_read_and_is_afterwards() -> None:
    async with rig(fetch_block_s=0.05) as r:
        chat = chat_after(await first_turn(r))
        forget(r.prefill.engine.pool)
        run = await place(r, chat)
        await until(lambda: r.fetches.pulls)
        pool = r.decode.engine.pool
        lent = pool.blocks(LoanHolder(run))
        assert not set(pool.allocate(RunHolder(9), pool.available)) & set(lent)
        pool.release(RunHolder(9))
        assert (await finish(r, run))[1] == 20
        await until(r.clean)
        forget(pool)
