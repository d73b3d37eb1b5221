"""Several tokens a step through the whole worker: one frame, replayed from anywhere, resumed at any index."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from schemas.control import Position, Verb
from schemas.job import Choice
from schemas.lifecycle import State
from services.engine.scripted import Script
from tests.worker.rig import EOS, Rig, rig, until

CHORUS = [11, 12, 13, 14, 15]
SONG = tuple(CHORUS * 4 + [16, 17] + CHORUS * 3)
SCRIPTS = (Script(prompt_contains=(20, 21), tokens=SONG),)


async def sung(r: Rig) -> int:
    run, _ = await r.submit(r.job(max_tokens=60))
    await until(lambda: r.edge.ended(run))
    return run


async def test_a_frame_holds_what_one_step_drew():
    async with rig(scripts=SCRIPTS, guess=7) as r:
        run = await sung(r)
        assert r.edge.tokens(run) == [*SONG, EOS]
        frames = [frame for frame in r.edge.frames if frame.hop == 2]
        assert len(frames) < 0.7 * len(SONG)
        assert max(len(frame.tokens) for frame in frames) > 3
        assert [frame.index for frame in frames] == [sum(len(f.tokens) for f in frames[:at]) for at in range(len(frames))]
        assert [bool(frame.finish) for frame in frames] == [False] * (len(frames) - 1) + [True]
        await until(r.clean)


@pytest.mark.parametrize("index", range(0, len(SONG), 5))
async def test_a_replay_begins_within_a_frame(index: int):
    async with rig(scripts=SCRIPTS, guess=7) as r:
        run = await sung(r)
        r.edge.frames.clear()
        r.edge.control(run, Verb.REPLAY, to=r.control_of(r.decode), positions=(Position(choice=0, index=index),))
        await until(lambda: r.edge.frames and r.edge.frames[-1].finish)
        assert r.edge.frames[0].index <= index
        assert [token for frame in r.edge.frames for token in frame.tokens] == [*SONG, EOS][r.edge.frames[0].index :]


async def test_digests_say_the_last_index():
    async with rig(scripts=SCRIPTS, guess=7) as r:
        run = await sung(r)
        await until(lambda: any(e.run == run and e.state is State.FINISHED for d in r.edge.digests for e in d.runs))
        assert r.edge.digests[-1].runs[0].last == ((0, len(SONG)),)


async def test_a_resume_goes_on_where_the_edge_was():
    async with rig(scripts=SCRIPTS, guess=7) as r:
        first = r.job(max_tokens=60)
        again = replace(first, attempt=2, resume=True, choices=(Choice(index=0, generated=SONG[:13]),))
        run, _ = await r.submit(again)
        await until(lambda: r.edge.ended(run))
        frames = [frame for frame in r.edge.frames if frame.run == run and frame.hop == 2]
        assert frames[0].index == 13
        assert [token for frame in frames for token in frame.tokens] == [*SONG, EOS][13:]
