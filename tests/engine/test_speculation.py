"""Which rows get a draft; and, on the scripted engine, that drafts change no token, no finish and no block's owner."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.clock import ManualClock
from services.engine.core import StepEngine
from services.engine.protocol import EngineInfo, RunSpec
from services.engine.scheduler import Chunk
from services.engine.scripted import Script, ScriptedRunner
from services.engine.sequence import Sequence as EngineSequence
from services.engine.speculation import build_scheduler
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from services.settings.worker import WorkerSettings
from tests.engine.torch_engine.rig import Running, copy_blocks

BLOCK = 4
EOS = 0
CONTEXT = 120
CHORUS = [11, 12, 13, 14, 15]
SONG = tuple(CHORUS * 4 + [16, 17] + CHORUS * 3 + [16, 18])
SCRIPTS = (Script(prompt_contains=(50,), tokens=SONG),)


def info(max_batch: int = 8) -> EngineInfo:
    return EngineInfo(
        name="scripted",
        version="1",
        model="m",
        weights="w",
        kv_compat="k",
        capabilities=Capabilities(n=True),
        context_length=CONTEXT,
        vocab_size=100,
        block_tokens=BLOCK,
        eos_ids=frozenset({EOS}),
        step_tokens=32,
        max_batch=max_batch,
    )


def engine(guess: int, *, blocks: int = 200, vocab: Sequence[int] = (20, 21), scripts: Sequence[Script] = SCRIPTS) -> StepEngine:
    """With two ids to draw from, a guess is often right, and often wrong."""
    memory = memoryview(bytearray(blocks * BLOCK * 8))
    pool = BlockPool(blocks, block_bytes=BLOCK * 8, memory=memory, prefix=prefix_cache(enabled=True))
    runner = ScriptedRunner(pool, block_tokens=BLOCK, vocab=vocab, eos_id=EOS, scripts=scripts)
    scheduler = build_scheduler(WorkerSettings(max_batch=8, step_tokens=32, speculative_tokens=guess), info(), pool)
    return StepEngine(info(), pool, runner, scheduler, ManualClock())


def spec(run: int, prompt: Sequence[int], *generated: tuple[int, ...], **sampling: Any) -> RunSpec:
    settings = Sampling(**{"seed": run, "max_tokens": 40, "temperature": 1.0} | sampling)
    choices = tuple(Choice(index=index, generated=ids) for index, ids in enumerate(generated or ((),)))
    return RunSpec(run, tuple(prompt), choices, settings)


def answers(running: Running, run: int) -> dict[int, list[tuple[int, int, FinishReason | None]]]:
    found: dict[int, list[tuple[int, int, FinishReason | None]]] = {}
    for output in running.outputs(run):
        found.setdefault(output.choice, []).append((output.index, output.token, output.finish))
    return found


def drafts(running: Running) -> tuple[int, int]:
    """Guessed, and right."""
    return sum(report.drafted for report in running.reports), sum(report.accepted for report in running.reports)


@pytest.mark.parametrize("number", range(12))
async def test_drafts_change_no_token_and_no_finish(number: int) -> None:
    random = Random(number)
    specs = []
    for run in range(6):
        prompt = random.choices(range(30, 40), k=random.randint(1, 20)) + ([50] if random.random() < 0.3 else [])
        n = random.choice([1, 1, 1, 2, 3])
        kind = random.choice([{}, {"temperature": 0.0}, {"min_tokens": 9, "stop_token_ids": (20,)}, {"logprobs": 2}])
        specs.append(spec(run, prompt, *[()] * n, max_tokens=random.randint(1, 60), **kind))
    async with Running(engine(0)) as plain, Running(engine(7)) as guessing:
        for running in (plain, guessing):
            await running.generate(*specs)
            await running.generate(*(spec(10 + s.run, s.prompt, *[()] * len(s.choices), seed=s.run) for s in specs))
        for run in (*range(6), *range(10, 16)):
            assert answers(guessing, run) == answers(plain, run)
            assert guessing.end(run) == plain.end(run)
        assert drafts(plain) == (0, 0)
        guessed, right = drafts(guessing)
        assert guessed > right > 0
        assert len(guessing.reports) < len(plain.reports)


async def test_a_repetition_takes_few_steps() -> None:
    async with Running(engine(7)) as running:
        assert await running.generate(spec(1, [50])) == [[*SONG, EOS]]
        guessed, right = drafts(running)
        assert right / guessed > 0.5
        assert sum(bool(report.tokens) for report in running.reports) < 0.6 * len(SONG)


@pytest.mark.parametrize("cut", [1, 5, 23])
async def test_handed_over_and_resumed(cut: int) -> None:
    what = spec(1, [30, 31, 50, 32], seed=9)
    async with Running(engine(0)) as plain, Running(engine(7)) as prefill, Running(engine(7)) as decode:
        ((whole),) = await plain.generate(what)
        prefill.engine.prefill(what)
        first: FirstToken = await prefill.prefilled(1)
        assert prefill.outputs(1) == plain.outputs(1)[:1], "prefill draws one token"
        copy_blocks(prefill.engine, decode.engine, 1)
        decode.engine.decode(what, (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(1)
        assert [first.token, *decode.tokens(1)] == whole
        assert await decode.generate(spec(2, what.prompt, tuple(whole[:cut]), seed=9)) == [whole[cut:]]


@pytest.mark.parametrize("guess", [0, 7])
async def test_a_fault_comes_at_its_index(guess: int) -> None:
    script = Script(prompt_contains=(50,), tokens=SONG, fail_at=17)
    async with Running(engine(guess, scripts=[script])) as running:
        assert await running.generate(spec(1, [50])) == [list(SONG[:17])]
        end = running.end(1)
        assert end is not None
        assert end.state is State.FAILED


def decoding(pool: BlockPool, blocks: int, **sampling: Any) -> EngineSequence:
    """A sequence in a loop, whose last id is to be computed."""
    asked = spec(1, [1, 2] * 3, **sampling)
    sequence = EngineSequence(asked, 0, [*asked.prompt, 1, 2, 1], (), 0, then_decode=True, computed=8)
    sequence.blocks = tuple(pool.allocate(RunHolder(1), blocks))
    return sequence


def planned(pool: BlockPool, sequence: EngineSequence, guess: int = 4) -> Chunk:
    step = build_scheduler(WorkerSettings(speculative_tokens=guess), info(), pool).plan([sequence])
    assert step is not None
    return step.chunks[0]


def test_a_draft_is_planned_behind_the_last_id() -> None:
    pool = BlockPool(9)
    chunk = planned(pool, decoding(pool, 3))
    assert (chunk.start, chunk.count, chunk.ids, chunk.draft) == (8, 5, [1, 2, 1, 2, 1], (2, 1, 2, 1))
    assert list(chunk.logit_rows) == [0, 1, 2, 3, 4]
    assert planned(BlockPool(9), decoding(BlockPool(9), 3), guess=0).draft == ()


@pytest.mark.parametrize(("left", "drafted"), [(1, 0), (2, 1), (3, 2), (9, 4)])
def test_no_draft_passes_max_tokens(left: int, drafted: int) -> None:
    pool = BlockPool(9)
    assert len(planned(pool, decoding(pool, 3, max_tokens=3 + left)).draft) == drafted


def test_a_draft_takes_free_blocks_and_no_others() -> None:
    pool = BlockPool(4)
    assert len(planned(pool, decoding(pool, 3)).draft) == 4
    assert pool.free == 0
    full = BlockPool(3)
    assert len(planned(full, decoding(full, 3)).draft) == 3, "9 ids and 3 more fill 3 blocks"


def test_who_only_prefills_gets_no_draft() -> None:
    pool = BlockPool(9)
    sequence = decoding(pool, 3)
    sequence.then_decode = False
    assert planned(pool, sequence).draft == ()


def test_a_full_batch_gets_no_drafts() -> None:
    pool = BlockPool(60)
    sequences = []
    for run in range(8):
        asked = spec(run, [1, 2] * 3)
        sequence = EngineSequence(asked, 0, [*asked.prompt, 1, 2, 1], (), 0, then_decode=True, computed=8)
        sequence.blocks = tuple(pool.allocate(RunHolder(run), 4))
        sequences.append(sequence)
    scheduler = build_scheduler(WorkerSettings(speculative_tokens=7), info(), pool)
    few, many = scheduler.plan(sequences[:4]), scheduler.plan(sequences)
    assert few is not None
    assert many is not None
    assert [len(chunk.draft) for chunk in few.chunks] == [1] * 4
    assert [len(chunk.draft) for chunk in many.chunks] == [0] * 8


async def test_preempted_beside_drafts() -> None:
    """A pool too small for all: what ends early, and what does not, said what it says alone."""
    specs = [spec(run, [30 + run, 31, 32], max_tokens=40) for run in range(5)]
    async with Running(engine(0)) as plain, Running(engine(7, blocks=24)) as guessing:
        expected = await plain.generate(*specs)
        await guessing.generate(*specs)
        ends = [guessing.end(run) for run in range(5)]
        states = [end.state for end in ends if end is not None]
        assert State.FINISHED in states
        assert State.RETRY in states
        assert drafts(guessing)[1] > 0
        for run, state in enumerate(states):
            said = guessing.tokens(run)
            assert said == expected[run][: len(said)]
            assert state is State.RETRY or len(said) == len(expected[run])
