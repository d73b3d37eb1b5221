"""Where a decode worker's CPU goes, stage by stage: microseconds a step, and for each row of it.

    .venv/bin/python -m bench.decode_stages [--rounds 5]

Runs of 256 tokens in this process, all begun at once, with a scripted engine. One stage after another is added, and what it adds
is its row: the engine alone, then the worker's records (kept, encoded, given to a bus that swallows them), then the connection to
a nats-server. User and system time, the least of the rounds, at 4 and at 32 rows: a line through both is the cost of a step and
of a row. Not in it: how runs come here (`bench.overhead` has all).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, cast

import uvloop

from schemas.handoff import FirstToken
from schemas.identity import job_id, process_id, run_id
from schemas.job import Deadlines, Job, Sampling, pack_ids
from schemas.lifecycle import State
from schemas.state import Role
from schemas.subjects import Subjects
from services.bus.dialect import Dialect
from services.bus.interface import Bus
from services.bus.nats_bus import connect
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec, StepReport
from services.engine.scheduler import ChunkedScheduler
from services.engine.scripted import SLOT, SLOT_BYTES, ScriptedRunner, link
from services.kv.holders import RunHolder
from services.kv.pool import BlockPool
from services.kv.prefix_cache import prefix_cache
from services.telemetry.metrics import Metrics
from services.worker.steps import take_step
from services.worker.worker import Worker
from tests.engine.scripted import scripted_info
from tests.nats_fixture import NatsServer

FEW, MANY = 4, 32
TOKENS, PROMPT, BLOCK_TOKENS, BLOCKS, EOS = 256, 48, 64, 1024, 0
RANDOM = Random(1)
EDGE = process_id("e1", time.time(), RANDOM)
Stage = Callable[[int], Awaitable[float]]
"""CPU seconds of one round with so many rows."""


class Swallows:
    """A `Bus` that sends nothing."""

    process, dialect, connected = process_id("d1", time.time(), RANDOM), Dialect(), True

    def publish(self, *_: Any, **__: Any) -> None:
        return None

    def down_for(self) -> float:
        return 0.0


def engine() -> StepEngine:
    memory = memoryview(bytearray(BLOCKS * BLOCK_TOKENS * SLOT_BYTES))
    pool = BlockPool(BLOCKS, block_bytes=BLOCK_TOKENS * SLOT_BYTES, memory=memory, prefix=prefix_cache(enabled=True))
    runner = ScriptedRunner(pool, block_tokens=BLOCK_TOKENS, vocab=tuple(range(10, 40_000)), eos_id=EOS)
    info = scripted_info(BLOCK_TOKENS, context_length=8192, vocab_size=40_000, step_tokens=8192, max_batch=MANY)
    return StepEngine(info, pool, runner, ChunkedScheduler(max_batch=MANY, max_tokens=8192), SystemClock())


def job() -> Job:
    return Job(
        job=job_id(RANDOM),
        attempt=1,
        model="m",
        prompt=pack_ids([RANDOM.randrange(10, 40_000) for _ in range(PROMPT)]),
        sampling=Sampling(seed=RANDOM.getrandbits(64), max_tokens=TOKENS),
        deadlines=Deadlines(stamp=time.time(), total=600.0),
        reply_to=f"hr.reply.{EDGE}",
        edge=EDGE,
    )


def give(to: StepEngine, run: int, what: Job) -> None:
    """A run whose prompt was computed elsewhere: its blocks hold what the scripted engine expects there."""
    spec = RunSpec.of(run, what)
    (block,) = to.pool.allocate(RunHolder(run), 1)
    for position, fingerprint in enumerate(accumulate(spec.prompt, link, initial=0)):
        if position:
            SLOT.pack_into(to.pool.view(block), (position - 1) * SLOT_BYTES, fingerprint)
    to.decode(spec, (FirstToken(choice=0, index=0, token=10),), cached_tokens=0, compute_s=0.0)


async def engine_alone(rows: int) -> float:
    computing, left = engine(), rows
    over = asyncio.Event()

    def on_step(report: StepReport) -> None:
        nonlocal left
        left -= len(report.ended)
        if left == 0:
            over.set()

    for _ in range(rows):
        give(computing, run_id(RANDOM), job())
    began = time.process_time()
    computing.start(on_step)
    await over.wait()
    spent = time.process_time() - began
    await computing.stop()
    return spent


async def whole_worker(bus: Bus, rows: int) -> float:
    computing = engine()
    worker = Worker(bus, Subjects(), computing, Role.DECODE, SystemClock(), Metrics.collecting("d1"))
    for _ in range(rows):
        run, what = run_id(RANDOM), job()
        give(computing, run, what)
        worker.admit(run, what, 2, State.DECODING, lambda: None)
    began = time.process_time()
    computing.start(partial(take_step, worker))
    await worker.idle(60.0)
    spent = time.process_time() - began
    await worker.close()
    return spent


async def measure(stage: Stage, rounds: int) -> tuple[float, float]:
    """Microseconds a step, and a row."""
    steps = TOKENS - 1
    few, many = [1e6 * min([await stage(rows) for _ in range(rounds)]) / steps for rows in (FEW, MANY)]
    row = (many - few) / (MANY - FEW)
    return few - FEW * row, row


async def main(server: NatsServer, rounds: int) -> None:
    bus = await connect(server.url, process_id("d1", time.time(), RANDOM), "worker")
    stages: dict[str, Stage] = {
        "engine": engine_alone,
        "records": lambda rows: whole_worker(cast("Bus", Swallows()), rows),
        "NATS": lambda rows: whole_worker(bus, rows),
    }
    print(f"| | µs a step | µs a row | µs a token of {MANY} rows |\n|---|---|---|---|")
    step = row = 0.0
    for name, stage in stages.items():
        all_step, all_row = await measure(stage, rounds)
        added = (all_step - step, all_row - row)
        step, row = all_step, all_row
        print(f"| {name} | {added[0]:.0f} | {added[1]:.1f} | {added[0] / MANY + added[1]:.1f} |", flush=True)
    print(f"| all | {step:.0f} | {row:.1f} | {step / MANY + row:.1f} |")
    await bus.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    with tempfile.TemporaryDirectory() as scratch:
        nats = NatsServer(Path(scratch))
        nats.start()
        try:
            uvloop.run(main(nats, options.parse_args().rounds))
        finally:
            nats.stop()
