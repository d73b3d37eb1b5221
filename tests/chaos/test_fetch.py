"""Prefill fetches from decode, and one of the two is killed or stopped: the tokens are the same, and nothing stays held.

The test plays edge and router, so that it knows who fetches from whom: p1 and d1 answer first, then p2 and d2, with what d1 has.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import pytest

from schemas.codec import decode, encode
from schemas.identity import job_id, process_id, run_id
from schemas.job import Deadlines, Job, Sampling, pack_ids
from schemas.lifecycle import State
from schemas.placement import Accept, CachedBlocks, Lease, LeaseAnswer, LeaseItem, LeaseVerb, Placement, WorkerAnswer
from schemas.reply import Event, Frame, Frames, Reply
from schemas.state import EdgeBeat
from schemas.subjects import Subjects
from services.bus.interface import Msg
from services.bus.nats_bus import Credentials, NatsBus, connect
from services.bus.typed import ask
from tests.chaos import processes
from tests.chaos.processes import back, kill, pid, stopped
from tests.chaos.streams import until
from tests.chaos.tap import addressee, tap
from tests.e2e.conftest import StartScripted
from tests.e2e.operator import operator
from tests.e2e.running import Up
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

S = Subjects()
BLOCK_TOKENS = 16
BLOCKS = 12
TRIES = 5
PROMPT = [20 + number % 40 for number in range(BLOCKS * BLOCK_TOKENS)]
LARGE = {
    "HEADRACE_SCRIPTED__BLOCK_BYTES": str(8 * 2**20),  # a transfer takes long enough to be met in the middle
    "HEADRACE_WORKER__KV_BLOCKS": "200",
}


@dataclass
class Player:
    """Edge and router in one."""

    up: Up
    edge: NatsBus
    router: NatsBus
    random: Random = field(default_factory=Random)
    frames: list[Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    asked: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By run: who was to prefill and to decode it."""

    def on_reply(self, msg: Msg) -> None:
        reply = decode(msg.data, Reply)  # type: ignore[arg-type]
        if isinstance(reply, Frames):
            self.frames += reply.frames
            self.events += reply.events

    async def beat(self) -> None:
        while True:
            self.edge.publish(S.edge_state(self.edge.process), encode(EdgeBeat(process=self.edge.process, sent=time.time())))
            await asyncio.sleep(0.5)

    async def submit(self, prefill: str, decode_: str, *, fetch: str = "") -> int:
        """The run that a worker accepted."""
        run, to = run_id(self.random), processes.process_id(self.up, decode_)
        job = Job(
            job=job_id(self.random),
            attempt=1,
            model="tiny",
            prompt=pack_ids(PROMPT),
            sampling=Sampling(seed=1, max_tokens=8, temperature=0.0, ignore_eos=True),
            deadlines=Deadlines(stamp=time.time(), total=60.0),
            reply_to=S.reply(self.edge.process),
            edge=self.edge.process,
        )
        room = LeaseItem(run=run, verb=LeaseVerb.RESERVE, blocks=BLOCKS + 1)
        reserved = await ask(self.router, S.decode_lease(to), Lease(process="r", items=(room,)), LeaseAnswer, timeout=PATIENCE_S)
        assert reserved.results[0].ok
        cached = CachedBlocks(process=processes.process_id(self.up, fetch), blocks=BLOCKS) if fetch else None
        placement = Placement(run=run, job=job, decode=to, fetch=cached)
        subject = S.prefill_submit(processes.process_id(self.up, prefill))
        taken = await ask(self.router, subject, placement, WorkerAnswer, timeout=PATIENCE_S)
        assert isinstance(taken, Accept), taken
        self.asked[run] = prefill, decode_
        return run

    def ends(self, run: int) -> list[State]:
        return [event.state for event in self.events if event.run == run and event.state.terminal]

    async def answer(self, run: int) -> tuple[list[int], int]:
        """Tokens in decode's stream, and how many of the prompt's were cached at first.

        As an edge it begins again what ends as RETRY: a decode worker that is not let run for 300 ms takes no handoff.
        """
        await until(lambda: bool(self.ends(run)), 60.0)
        cached = next(frame.cached_tokens for frame in self.frames if frame.run == run)
        while self.ends(run) == [State.RETRY]:
            run = await self.submit(*self.asked[run])
            await until(lambda run=run: bool(self.ends(run)), 60.0)  # type: ignore[misc]
        assert self.ends(run) == [State.FINISHED]
        frames = sorted((frame for frame in self.frames if frame.run == run and frame.hop == 2), key=lambda frame: frame.index)
        return [token for frame in frames for token in frame.tokens], cached


@asynccontextmanager
async def player(up: Up) -> AsyncIterator[Player]:
    passwords = json.loads((up.home / "nats" / "passwords.json").read_text())
    async with AsyncExitStack() as stack:
        buses = []
        for role in ("edge", "router"):
            process = process_id("x", time.time(), Random())
            url = f"nats://127.0.0.1:{up.nats_port}"
            bus = await connect(url, process, role, credentials=Credentials(role, passwords[role]))
            stack.push_async_callback(bus.drain, 2.0)
            buses.append(bus)
        made = Player(up, *buses)
        await made.edge.subscribe(S.reply(made.edge.process), made.on_reply)
        beating = asyncio.create_task(made.beat())
        stack.callback(beating.cancel)
        yield made


def pair_of_pairs(start: StartScripted, transfer: str) -> Up:
    return start("--prefill", "2", "--decode", "2", HEADRACE_WORKER__TRANSFER=transfer, **LARGE)


async def at_the_offer(up: Up, strike: Callable[[], object], submit: Callable[[], object]) -> None:
    """`strike` when d1 is asked for what it has."""
    async with tap(up) as bus:
        striking = asyncio.create_task(bus.first("hr.decode.*.offer", addressee, lambda _: strike()))
        await bus.operator.client.flush()
        await submit()  # type: ignore[misc]
        await striking


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
async def test_undisturbed_it_is_fetched(scripted_stack: StartScripted, transfer: str) -> None:
    """A fetch has less than a second. Where the machine is too busy for that p2 computes the prompt, and is asked anew."""
    up = pair_of_pairs(scripted_stack, transfer)
    async with player(up) as plays, operator(up) as op:
        expected = (await plays.answer(await plays.submit("p1", "d1")))[0]
        for _ in range(TRIES):
            tokens, cached = await plays.answer(await plays.submit("p2", "d2", fetch="d1"))
            assert tokens == expected
            if cached:
                break
            await restarted(up, "p2")
        assert cached == (BLOCKS - 1) * BLOCK_TOKENS
        await op.assert_clean()


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
async def test_the_lender_is_killed(scripted_stack: StartScripted, transfer: str) -> None:
    up = pair_of_pairs(scripted_stack, transfer)
    async with player(up) as plays, operator(up) as op:
        expected = (await plays.answer(await plays.submit("p1", "d1")))[0]
        before, runs = pid(up, "d1"), []

        async def submit() -> None:
            await restarted(up, "p2")
            runs.append(await plays.submit("p2", "d2", fetch="d1"))

        await at_the_offer(up, lambda: kill(up, "d1"), submit)
        assert (await plays.answer(runs[0]))[0] == expected
        await back(up, "d1", before)
        await serves(up, "d1")
        await op.assert_clean()


async def test_the_lender_is_stopped(scripted_stack: StartScripted) -> None:
    up = pair_of_pairs(scripted_stack, "shm")
    async with player(up) as plays, operator(up) as op:
        expected = (await plays.answer(await plays.submit("p1", "d1")))[0]
        await restarted(up, "p2")
        async with stopped(up, "d1"):
            assert await plays.answer(await plays.submit("p2", "d2", fetch="d1")) == (expected, 0)
        await op.assert_clean()


@pytest.mark.parametrize("transfer", ["shm", "tcp"])
async def test_the_fetching_worker_is_killed(scripted_stack: StartScripted, transfer: str) -> None:
    up = pair_of_pairs(scripted_stack, transfer)
    async with player(up) as plays, operator(up) as op:
        await plays.answer(await plays.submit("p1", "d1"))
        await restarted(up, "p2")
        before = pid(up, "p2")

        async def submit() -> None:
            await plays.submit("p2", "d2", fetch="d1")

        await at_the_offer(up, lambda: kill(up, "p2"), submit)
        await back(up, "p2", before)
        await op.assert_clean()


async def restarted(up: Up, name: str) -> None:
    """A worker with an empty cache, that serves."""
    await back(up, name, kill(up, name))
    await serves(up, name)


async def serves(up: Up, name: str) -> None:
    """Until the worker that was just started does."""
    async with operator(up) as op:
        process = processes.process_id(up, name)
        await op.until(lambda found: process in found, 60.0)
