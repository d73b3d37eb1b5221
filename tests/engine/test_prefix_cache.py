"""The step loop with a prefix cache. The scripted engine draws from what the blocks hold, so equal tokens prove a right hit."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling, Tier
from schemas.lifecycle import State
from services.clock import ManualClock
from services.engine.core import StepEngine
from services.engine.protocol import RunEnd, RunSpec, StepReport
from services.engine.scheduler import ChunkedScheduler, Step
from services.engine.scripted import Script, ScriptedRunner, Timing
from services.kv.hashing import block_hashes, chain_root
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from tests.engine.scripted import scripted_info
from tests.waiting import until

BLOCK = 4
BYTES = 8 * BLOCK
VOCAB = range(10, 90)


class Recording(ScriptedRunner):
    """Keeps (run, first token, tokens) of every chunk it computed."""

    computed: list[tuple[int, int, int]]

    async def execute(self, step: Step) -> Any:
        outcomes = await super().execute(step)
        self.computed += [(chunk.sequence.run, chunk.start, chunk.count) for chunk in step.chunks]
        return outcomes


class Rig:
    """A started scripted engine with a prefix cache, or without one."""

    def __init__(self, blocks: int = 64, *, cache: bool = True, scripts: tuple[Script, ...] = (), step_s: float = 0.0) -> None:
        memory = memoryview(bytearray(blocks * BYTES))
        self.pool = BlockPool(blocks, block_bytes=BYTES, memory=memory, prefix=prefix_cache(enabled=cache))
        timing = Timing(decode_step_s=step_s)
        self.runner = Recording(self.pool, block_tokens=BLOCK, vocab=VOCAB, eos_id=0, scripts=scripts, timing=timing)
        self.runner.computed = []
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.prefilled: list[int] = []
        self.ends: dict[int, RunEnd] = {}
        info = scripted_info(BLOCK)
        scheduler = ChunkedScheduler(max_batch=8, max_tokens=32, chunk_tokens=8)
        self.engine = StepEngine(info, self.pool, self.runner, scheduler, ManualClock())

    async def __aenter__(self) -> Rig:
        self.engine.start(self._on_step)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.stop()
        self.pool.check_integrity()
        assert self.pool.held == sum(len(self.pool.blocks(RunHolder(run))) for run in self.prefilled)

    def _on_step(self, report: StepReport) -> None:
        self.pool.check_integrity()
        for output in report.tokens:
            self.tokens.setdefault(output.run, []).append(output.token)
            self.cached[output.run] = output.cached_tokens
        self.prefilled += report.prefilled
        self.ends |= {end.run: end for end in report.ended}

    async def ended(self, *runs: int) -> None:
        await until(lambda: self.ends.keys() >= set(runs), what=f"the end of {runs}")

    async def answer(self, run: int, prompt: Sequence[int], **options: Any) -> list[int]:
        self.engine.prefill(spec(run, prompt, **options), then_decode=True)
        await self.ended(run)
        return self.tokens.get(run, [])

    def recomputed(self, run: int) -> list[int]:
        """The first token of each of the run's chunks."""
        return [start for of, start, _ in self.runner.computed if of == run]


def spec(
    run: int,
    prompt: Sequence[int],
    *,
    generated: tuple[int, ...] = (),
    salt: bytes = b"",
    adapter: str | None = None,
    tier: Tier = Tier.PAID,
    **sampling: Any,
) -> RunSpec:
    settings = Sampling(**{"seed": 5, "max_tokens": 6, "ignore_eos": True} | sampling)
    choices = (Choice(index=0, generated=generated),)
    return RunSpec(run, tuple(prompt), choices, settings, tier, salt, adapter)


async def alone(prompt: Sequence[int], **options: Any) -> list[int]:
    """What an engine without a cache answers."""
    async with Rig(cache=False) as rig:
        answer = await rig.answer(1, prompt, **options)
        assert (rig.cached[1], rig.pool.cached) == (0, 0)
        return answer


PROMPT = list(range(20, 33))


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
async def test_the_second_run_computes_only_what_is_new(length: int, hit: int) -> None:
    """At least the prompt's last token is computed: a step needs its logits."""
    async with Rig() as rig:
        first = await rig.answer(1, PROMPT[:length])
        second = await rig.answer(2, PROMPT[:length])
        assert first == second == await alone(PROMPT[:length])
        assert (rig.cached[1], rig.cached[2]) == (0, hit)
        assert rig.recomputed(2)[0] == hit


async def test_prompts_that_share_a_beginning() -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT)
        other = [*PROMPT[:9], 70, 71, 72, 73]
        assert await rig.answer(2, other) == await alone(other)
        assert rig.cached[2] == 8


async def test_the_next_turn_of_a_chat_reuses_the_answer() -> None:
    """Generated blocks are cached, too; the tail and the token that was never computed are not."""
    async with Rig() as rig:
        chat = list(PROMPT)
        for turn in range(1, 5):
            answer = await rig.answer(turn, chat, max_tokens=7)
            assert answer == await alone(chat, max_tokens=7)
            assert rig.cached[turn] == (0 if turn == 1 else (len(chat) - 2 - 1) // BLOCK * BLOCK)
            chat += [*answer, 11, 12]


async def test_a_resumed_attempt_reports_of_the_prompt_only() -> None:
    async with Rig() as rig:
        answer = await rig.answer(1, PROMPT, max_tokens=12)
        rest = await rig.answer(2, PROMPT, generated=tuple(answer[:9]), max_tokens=12)
        assert rest == answer[9:]
        assert rig.recomputed(2)[0] == 20
        assert rig.cached[2] == len(PROMPT)


async def test_runs_that_compute_the_same_together_end_up_sharing_it() -> None:
    async with Rig(step_s=0.005) as rig:
        for run in (1, 2, 3):
            rig.engine.prefill(spec(run, PROMPT, seed=run, max_tokens=40), then_decode=True)
        await until(lambda: all(len(rig.tokens.get(run, ())) >= 2 for run in (1, 2, 3)))
        held = [rig.pool.blocks(RunHolder(run))[:3] for run in (1, 2, 3)]
        assert held[0] == held[1] == held[2]
        await rig.ended(1, 2, 3)
        for run in (1, 2, 3):
            assert rig.tokens[run] == await alone(PROMPT, seed=run, max_tokens=40)


@pytest.mark.parametrize("options", [{"salt": b"other tenant"}, {"adapter": "a"}, {"prompt_logprobs": 1}])
async def test_who_must_not_share_does_not(options: dict[str, Any]) -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT)
        await rig.answer(2, PROMPT, **options)
        assert rig.cached[2] == 0
        assert rig.recomputed(2)[0] == 0


async def test_prompt_logprobs_do_not_keep_others_from_sharing() -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT, prompt_logprobs=1)
        await rig.answer(2, PROMPT)
        assert rig.cached[2] == 12


async def test_a_prompt_left_for_the_handoff_is_shareable_at_once() -> None:
    async with Rig() as rig:
        rig.engine.prefill(spec(1, PROMPT))
        await until(lambda: rig.prefilled)
        assert await rig.answer(2, PROMPT) == await alone(PROMPT)
        assert rig.cached[2] == 12
        assert rig.pool.blocks(RunHolder(1))[3] not in rig.pool.prefix.match(names(PROMPT))
        rig.pool.release(RunHolder(1))
        assert rig.pool.held == 0


def names(ids: Sequence[int]) -> list[bytes]:
    return block_hashes(ids, BLOCK, chain_root("k", b""))


async def test_blocks_pulled_by_a_handoff_are_shareable() -> None:
    async with Rig() as source, Rig() as rig:
        source.engine.prefill(spec(1, PROMPT))
        await until(lambda: source.prefilled)
        blocks = rig.pool.allocate(RunHolder(1), 4)
        for theirs, mine in zip(source.pool.blocks(RunHolder(1)), blocks, strict=True):
            rig.pool.view(mine)[:] = source.pool.view(theirs)
        first = FirstToken(choice=0, index=0, token=source.tokens[1][0])
        rig.engine.decode(spec(1, PROMPT), (first,), cached_tokens=0, compute_s=0.0)
        assert rig.pool.prefix.match(names(PROMPT)) == blocks[:3]
        await rig.ended(1)
        assert [first.token, *rig.tokens[1]] == await alone(PROMPT)
        assert await rig.answer(2, PROMPT) == await alone(PROMPT)
        assert rig.cached[2] == 12


async def test_a_cancelled_run_leaves_what_it_had_finished() -> None:
    async with Rig(step_s=0.005) as rig:
        rig.engine.prefill(spec(1, PROMPT, max_tokens=200), then_decode=True)
        await until(lambda: rig.tokens.get(1))
        rig.engine.cancel(1)
        await rig.ended(1)
        assert await rig.answer(2, PROMPT) == await alone(PROMPT)
        assert rig.cached[2] == 12


async def test_a_failed_run_leaves_what_it_had_finished() -> None:
    script = Script(prompt_contains=(99,), tokens=(50, 51, 52, 53), fail_at=2)
    async with Rig(scripts=(script,)) as rig:
        await rig.answer(1, [*PROMPT[:12], 99])
        assert rig.ends[1].state is State.FAILED
        assert await rig.answer(2, PROMPT) == await alone(PROMPT)
        assert rig.cached[2] == 12


async def test_a_preempted_run_resumes_from_the_cache() -> None:
    async with Rig(blocks=10) as rig:
        for run, tier in ((1, Tier.PAID), (2, Tier.FREE)):
            prompt = [run + 30] * 9
            rig.engine.prefill(spec(run, prompt, tier=tier, max_tokens=20), then_decode=True)
        await rig.ended(1, 2)
        assert (rig.ends[1].state, rig.ends[2].state, rig.ends[2].reason) == (State.FINISHED, State.RETRY, "preempted")
        before = tuple(rig.tokens[2])
        after = await rig.answer(3, [32] * 9, generated=before, max_tokens=20)
        assert [*before, *after] == await alone([32] * 9, max_tokens=20)


async def test_a_waiting_run_with_a_hit_counts_as_queued() -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT)
        rig.engine.prefill(spec(2, PROMPT))
        stats = rig.engine.stats()
        assert (stats.queued, stats.queued_tokens) == (1, 1)
        await until(lambda: rig.prefilled)


async def test_a_pool_full_of_cached_blocks_has_room() -> None:
    async with Rig(blocks=8) as rig:
        for run in range(1, 9):
            prompt = [20 + run] * 20
            assert await rig.answer(run, prompt) == await alone(prompt)
        assert rig.pool.available == 8


async def test_writing_into_a_shared_block_fails_the_run_and_writes_nothing() -> None:
    async with Rig(step_s=0.005) as rig:
        rig.engine.prefill(spec(1, PROMPT, max_tokens=200), then_decode=True)
        await until(lambda: rig.tokens.get(1))
        tail = rig.pool.blocks(RunHolder(1))[-1]
        rig.pool.hold(RunHolder(7), [tail])
        await rig.ended(1)
        assert (rig.ends[1].state, rig.ends[1].reason) == (State.FAILED, "engine_error")
        rig.pool.release(RunHolder(7))


async def test_random_chats_under_eviction_pressure() -> None:
    """Many chats that share beginnings in a pool that cannot keep them all: hits and evictions change no token."""
    random = Random(11)
    system = [[random.choice(VOCAB) for _ in range(length)] for length in (6, 9, 17)]
    chats = [[*random.choice(system), *random.choices(VOCAB, k=3)] for _ in range(12)]
    hits, run = 0, 0
    async with Rig(blocks=40) as rig:
        for _ in range(25):
            chosen = {run + offset: random.choice(chats) for offset in range(1, 4)}
            run += 3
            prompts = {number: list(chat) for number, chat in chosen.items()}
            for number, prompt in prompts.items():
                rig.engine.prefill(spec(number, prompt), then_decode=True)
                if random.random() < 0.2:
                    rig.engine.cancel(number)
            await rig.ended(*chosen)
            for number, prompt in prompts.items():
                if rig.ends[number].state is State.FINISHED:
                    assert rig.tokens[number] == await alone(prompt)
                    hits += rig.cached[number]
            for number, chat in chosen.items():
                chat += [*rig.tokens.get(number, []), random.choice(VOCAB)]
                del chat[60:]
        assert hits > 0
        events = rig.pool.prefix.drain_events()
        assert len(events.stored) <= 40
        assert rig.pool.generation(0) > 3, "there was pressure"
