"""Prefill and decode together on the in-memory bus: the life of a run, and what is said of it."""

from __future__ import annotations

from schemas.control import Position, Verb
from schemas.lifecycle import State
from schemas.placement import Accept
from schemas.reply import FinishReason
from services.engine.scripted import Script, Timing
from services.kv.holders import RunHolder
from tests.worker.rig import EOS, rig, until


async def test_a_job_goes_from_prefill_to_decode():
    async with rig() as r:
        run, answer = await r.submit(r.job(max_tokens=8))
        assert isinstance(answer, Accept)
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [
            (1, State.PREFILLING),
            (1, State.HANDING_OFF),
            (2, State.HANDING_OFF),
            (2, State.DECODING),
            (2, State.FINISHED),
        ]
        assert len(r.edge.tokens(run)) == 8
        assert [frame.finish for frame in r.edge.frames if frame.finish] == [FinishReason.LENGTH]
        assert [f.index for f in r.edge.frames if f.hop == 2] == list(range(8)), "decode's stream alone is complete"
        await until(r.clean)


async def test_the_handoff_changes_no_token():
    async with rig() as r:
        prompts = [list(range(20, 20 + length)) for length in (1, 3, 4, 5, 8, 17, 33)]
        for prompt in prompts:
            apart, _ = await r.submit(r.job(prompt, max_tokens=11))
            here, answer = await r.submit_locally(r.job(prompt, max_tokens=11))
            assert isinstance(answer, Accept)
            await until(lambda runs=(apart, here): all(r.edge.ended(x) for x in runs))
            assert r.edge.tokens(apart) == r.edge.tokens(here)
        await until(r.clean)


async def test_one_token_needs_no_handoff():
    async with rig() as r:
        run, _ = await r.submit(r.job(max_tokens=1))
        await until(lambda: r.edge.ended(run))
        assert r.edge.states(run) == [(1, State.PREFILLING), (1, State.FINISHED)]
        await until(r.clean)


async def test_end_of_sequence_stops_with_reason_stop():
    script = Script(prompt_contains=(20, 21), tokens=(50, 51, 52))
    async with rig(scripts=(script,)) as r:
        run, _ = await r.submit(r.job(max_tokens=100))
        await until(lambda: r.edge.ended(run))
        assert r.edge.tokens(run) == [50, 51, 52, EOS]
        assert r.edge.frames[-1].finish is FinishReason.STOP


async def test_a_lost_terminal_event_is_said_again():
    async with rig() as r:
        run, _ = await r.submit(r.job())
        await until(lambda: r.edge.ended(run))
        said = len(r.edge.events)
        r.edge.control(run, to=r.control_of(r.decode))
        await until(lambda: len(r.edge.events) > said)
        assert r.edge.events[-1].state is State.FINISHED


async def test_replay_from_an_index():
    async with rig() as r:
        run, _ = await r.submit(r.job(max_tokens=8))
        await until(lambda: r.edge.ended(run))
        tokens = r.edge.tokens(run)
        r.edge.frames.clear()
        positions = (Position(choice=0, index=5),)
        r.edge.control(run, Verb.REPLAY, to=r.control_of(r.decode), positions=positions)
        await until(lambda: r.edge.frames)
        assert [(f.index, f.tokens[0]) for f in r.edge.frames] == [(i, tokens[i]) for i in (5, 6, 7)]


async def test_digests_say_where_runs_stand():
    async with rig(decode=Timing(decode_step_s=0.02)) as r:
        run, _ = await r.submit(r.job(max_tokens=30))
        await until(lambda: any(e.run == run and e.state is State.DECODING for d in r.edge.digests for e in d.runs))
        await until(lambda: r.edge.ended(run))
        await until(lambda: any(e.run == run and e.state is State.FINISHED for d in r.edge.digests for e in d.runs))
        entry = next(e for d in reversed(r.edge.digests) for e in d.runs if e.run == run)
        assert entry.last == ((0, 29),)


async def test_foreign_blocks_are_noticed():
    """The scripted engine computes on what the blocks hold: other bytes, and the run fails instead of going on."""
    async with rig(decode=Timing(decode_step_s=0.2)) as r:
        run, _ = await r.submit(r.job(max_tokens=50))
        await until(lambda: r.decode.engine.pool.blocks(RunHolder(run)))
        block = r.decode.engine.pool.blocks(RunHolder(run))[2]
        await until(lambda: (2, State.DECODING) in r.edge.states(run))
        r.decode.engine.pool.view(block)[:] = bytes(64)
        await until(lambda: r.edge.ended(run))
        assert r.edge.ended(run) is State.FAILED
