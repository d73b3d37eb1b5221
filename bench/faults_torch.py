"""Faults with the torch engine and the default model: what is computed for who left, and what a death costs.

The first is the test that NVIDIA Dynamo 1.6.1 was measured with (docs/reliability.md): five long prompts are dropped before their
first token, then comes a short request.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from nats.aio.msg import Msg

from bench.figures import Row
from schemas.codec import decode
from schemas.job import Job
from services.settings.settings import Settings
from tests.chaos.processes import back, kill
from tests.chaos.streams import Progress, Question, ask, ask_all, clients, longest_pause, ready
from tests.chaos.tap import Tap, tap
from tests.e2e.running import Up, started

LONG_CHARACTERS = 6000
DROPPED = 5
SHORT_TOKENS = 48
STREAMS, STREAM_TOKENS = 32, 32
READY_S = 180


async def measure(rounds: int) -> list[Row]:
    async with _up("--prefill", "1", "--decode", "1") as up:
        rows = [await _short_after_dropped(up, rounds)]
    async with _up("--prefill", "1", "--decode", "2") as up, tap(up) as bus:
        rows.append(await _killed_decode(up, bus))
    return rows


@asynccontextmanager
async def _up(*counts: str) -> AsyncIterator[Up]:
    """A stack of its own over the models that are here already."""
    here = Settings().home_dir
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "home").mkdir()
        for part in ("models", "manifests", "kernels"):
            (folder / "home" / part).symlink_to(here.resolve() / part)
        argv = [sys.executable, "-m", "services.cli.main", "up", "--port", "0", *counts]
        model = {"HEADRACE_MODEL": os.environ["HEADRACE_MODEL"]} if "HEADRACE_MODEL" in os.environ else {}
        with started(argv, folder / "home", folder, env=model) as up:
            up.wait_ready(READY_S)
            yield up


async def _short_after_dropped(up: Up, rounds: int) -> Row:
    short = Question(2, SHORT_TOKENS, content="Tell me a story.", model=up.model)
    async with clients(up.url) as client:
        await _seconds(client, short)  # warm
        alone = statistics.median([await _seconds(client, short) for _ in range(rounds)])
        after = []
        for number in range(rounds):
            await _drop_long_ones(up, number)
            after.append(await _seconds(client, short))
    worst = max(after)
    figure = f"{alone:.2f} s alone, after them median {statistics.median(after):.2f} s"
    figure += f", worst {worst:.2f} s = {worst / alone:.2f} x ({rounds} rounds)"
    return f"torch: a request of {SHORT_TOKENS} tokens after {DROPPED} long prompts were dropped before their first token", figure


async def _drop_long_ones(up: Up, number: int) -> None:
    """Prompts that nobody has cached, given up while the first of them is computed."""

    async def ask_long(one: int) -> None:
        words = " ".join(f"{number} {one} {word}" for word in range(LONG_CHARACTERS // 8))
        async with clients(up.url) as client:
            await ask(client, Question(2 * one, 16, content=words, model=up.model))

    asking = [asyncio.create_task(ask_long(one)) for one in range(DROPPED)]
    await asyncio.sleep(0.3)
    for task in asking:
        assert not task.done(), "a long prompt was answered before it could be dropped"
        task.cancel()
    for task in asking:
        with suppress(asyncio.CancelledError):
            await task


async def _seconds(client: object, question: Question) -> float:
    started_at = time.monotonic()
    answer = await ask(client, question)  # type: ignore[arg-type]
    assert answer.whole, answer
    return time.monotonic() - started_at


async def _killed_decode(up: Up, bus: Tap) -> Row:
    """A pause is the detection, and the recomputation of what each stream had: prompt and tokens, by prefill."""
    asked = [Question(2 * number, STREAM_TOKENS, content=f"Story {number}, please.", model=up.model) for number in range(STREAMS)]
    await ask_all(up.url, asked[:4])  # warm
    submits = await bus.all_of("hr.submit.*")

    async def fault(progress: Progress) -> None:
        await progress.everybody_has(3, 120.0)
        await back(up, "d1", kill(up, "d1"), 60.0)

    pause = longest_pause(await ask_all(up.url, asked, fault))
    workers = await bus.operator.workers()
    rate = next(status["state"]["rates"]["prefill_tokens_s"] for name, status in workers.items() if name.startswith("p1-"))
    again = _recomputed(submits)
    await ready(up.url)
    what = f"torch: kill -9 of one of two decode workers under {STREAMS} streams: longest pause"
    figure = f"{pause:.2f} s; {len(again)} streams recomputed {sum(again)} tokens"
    figure += f", {sum(again) / rate:.2f} s at prefill's {rate:.0f} tokens/s"
    return what, figure


def _recomputed(submits: list[Msg]) -> list[int]:
    """Tokens that a resumed job brought along, of each job once."""
    jobs = {job.job: job for msg in submits if (job := decode(msg.data, Job)).resume}
    return [job.prompt_tokens + sum(len(choice.generated) for choice in job.choices) for job in jobs.values()]
