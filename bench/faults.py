"""How fast Headrace gets over a fault: real processes, a real nats-server, scripted engines and then torch. Run it alone:

    .venv/bin/python -m bench.faults [--samples 30] [--rounds 3] [--no-torch]

Takes some minutes (under 3 with `--samples 20 --rounds 2`) and prints the Markdown table of docs/reliability.md: a cancel from
the client's close until no worker has the run (in each state, alone and beside 7 and 31 running rows of the same worker), the
longest pause of 32 streams when a decode worker is killed or NATS restarts, how long workers compute for an edge that is gone;
`faults_torch` has the rows of the torch engine. The rig is the one of tests/chaos.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench import faults_torch
from bench.figures import Row, percentiles, rounds_of
from tests.chaos.processes import NATS, back, kill, stopped
from tests.chaos.streams import Progress, Question, ask, ask_all, clients, longest_pause, questions, ready
from tests.chaos.tap import Tap, addressee, tap
from tests.chaos.workers import Workers
from tests.e2e.operator import operator
from tests.e2e.running import Up, started
from tests.text.tiny import write_tiny_model_folder

ONE_AND_ONE = ("p1", "d1")
NAMES = ("p1", "p2", "d1", "d2")
SETTINGS = {
    "HEADRACE_SCRIPTED__DECODE_STEP_S": "0.05",
    "HEADRACE_SCRIPTED__PREFILL_TOKEN_S": "0.001",
    "HEADRACE_SCRIPTED__BLOCK_BYTES": str(2 * 2**20),  # so that a handoff of 20 blocks takes a while
    "HEADRACE_WORKER__KV_BLOCKS": "1000",
    "HEADRACE_WORKER__PREFIX_CACHE": "false",
}
LONG = "x" * 300


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=30, help="cancels in each state")
    options.add_argument("--rounds", type=int, default=3, help="kills and restarts")
    options.add_argument("--no-torch", action="store_true", help="scripted engines only")
    arguments = options.parse_args()
    rows = asyncio.run(measure(arguments.samples, arguments.rounds))
    if not arguments.no_torch:
        rows += asyncio.run(faults_torch.measure(arguments.rounds))
    print("| fault | measured |\n|---|---|")
    for what, figure in rows:
        print(f"| {what} | {figure} |")


async def measure(samples: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    async with _up("--prefill", "1", "--decode", "1") as up, tap(up) as bus:
        for others in (0, 7, 31):
            async with _running(up, others):
                for state, moment in _moments(bus).items():
                    took = [await _cancel(up, bus, moment, others) for _ in range(samples)]
                    rows.append((f"cancel while {state}, {others} other rows", percentiles(took)))
    async with _up("--prefill", "2", "--decode", "2", "--router", "2") as up, tap(up) as bus:
        rows += [await _killed_decode(up, rounds), await _killed_edge(up, bus, rounds), await _silent_edge(up, bus)]
        rows.append(await _restarted_nats(up, rounds))
    return rows


@asynccontextmanager
async def _up(*counts: str) -> AsyncIterator[Up]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = write_tiny_model_folder(folder / "tiny")
        up_command = [sys.executable, "-m", "services.cli.main", "up", "--port", "0", "--engine", "scripted"]
        argv = [*up_command, "--model", str(model), *counts]
        with started(argv, folder / "home", folder, env=SETTINGS) as up:
            up.wait_ready(60)
            yield up


# a cancel

Moment = Callable[[asyncio.Event], Awaitable[object]]
"""Returns when the client should close; the event is set by the first token."""


def _moments(bus: Tap) -> dict[str, Moment]:
    async def prefilling(_: asyncio.Event) -> None:
        await bus.first("hr.prefill.*.submit", addressee, lambda _: None)
        await asyncio.sleep(0.1)  # into its 0.3 s

    async def handing_off(_: asyncio.Event) -> None:
        await bus.first("hr.decode.*.handoff", addressee, lambda _: None)

    async def decoding(first: asyncio.Event) -> None:
        await first.wait()
        await asyncio.sleep(0.2)  # some steps further

    return {"prefilling": prefilling, "handing off": handing_off, "decoding": decoding}


async def _cancel(up: Up, bus: Tap, moment: Moment, others: int) -> float:
    """Seconds from the close until no worker has the run."""
    workers, first = Workers(bus.operator, up, ONE_AND_ONE), asyncio.Event()
    async with clients(up.url) as client:
        meeting = asyncio.ensure_future(moment(first))
        await asyncio.sleep(0.02)  # it listens before there is something to hear
        asking = asyncio.create_task(ask(client, Question(0, 150, content=LONG), first.set))
        async with asyncio.timeout(30.0):
            await meeting
        asking.cancel()
        started = time.monotonic()
        with suppress(asyncio.CancelledError):
            await asking
        await workers.at_most(others, within=10.0)
        return time.monotonic() - started


@asynccontextmanager
async def _running(up: Up, rows: int) -> AsyncIterator[None]:
    """That many streams beside, as long as the block lasts."""
    over = asyncio.Event()

    async def stream(number: int) -> None:
        async with clients(up.url) as client:
            while not over.is_set():
                await ask(client, Question(number, 400))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(number)) for number in range(rows)]
        try:
            yield
        finally:
            over.set()
            for task in tasks:
                task.cancel()


# processes that die


async def _killed_decode(up: Up, rounds: int) -> Row:
    pauses = []
    for number in range(rounds):
        name = f"d{number % 2 + 1}"

        async def fault(progress: Progress, name: str = name) -> None:
            await progress.everybody_has(3)
            await back(up, name, kill(up, name))

        pauses.append(longest_pause(await ask_all(up.url, questions(32, 60), fault)))
        await ready(up.url)
        async with operator(up) as op:
            await op.until(lambda found: len(found) == len(NAMES), 30.0)
    return "kill -9 decode under 32 streams: longest pause", rounds_of(pauses)


async def _killed_edge(up: Up, bus: Tap, rounds: int) -> Row:
    took = []
    for _ in range(rounds):
        workers = Workers(bus.operator, up, NAMES)

        async def fault(progress: Progress, workers: Workers = workers) -> None:
            await progress.everybody_has(3)
            before = kill(up, "e1")
            took.append(await workers.idle_after(10.0))
            await back(up, "e1", before)

        await ask_all(up.url, questions(32, 300), fault)
        await ready(up.url)
    return "kill -9 edge with 32 jobs, proven: until both pools are free", rounds_of(took)


async def _silent_edge(up: Up, bus: Tap) -> Row:
    workers = Workers(bus.operator, up, NAMES)
    took = []

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3)
        async with stopped(up, "e1"):
            took.append(await workers.idle_after(10.0))

    await ask_all(up.url, questions(32, 60), fault)
    return "edge stopped with 32 jobs, no proof: until both pools are free", rounds_of(took)


async def _restarted_nats(up: Up, rounds: int) -> Row:
    pauses = []
    for _ in range(rounds):

        async def fault(progress: Progress) -> None:
            await progress.everybody_has(3)
            await back(up, NATS, kill(up, NATS))

        pauses.append(longest_pause(await ask_all(up.url, questions(32, 60), fault)))
        await ready(up.url)
    return "kill -9 nats-server under 32 streams (the supervisor waits 0.25 s and more): longest pause", rounds_of(pauses)


if __name__ == "__main__":
    main()
