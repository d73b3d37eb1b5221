"""Edges that serve detached jobs, as processes of their own beside a stack: start, ask, kill, stop."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any

from schemas.identity import process_id
from tests.e2e.running import ROOT, Up

START_S = 60.0


@dataclass
class Reading:
    """What one reader got. `times`: when each token came (monotonic seconds)."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""
    done: bool = False


class EdgeProcess:
    def __init__(self, process: asyncio.subprocess.Process, identity: str) -> None:
        self.id = identity
        self._process = process
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {0: asyncio.Queue()}
        self._listening = asyncio.create_task(self._listen())

    async def ready(self) -> None:
        async with asyncio.timeout(START_S):
            await self._answers[0].get()

    async def submit(self, number: int, max_tokens: int, total_s: float = 300.0) -> str:
        """A job that may take `total_s`; the same `number` and `max_tokens` give the same tokens."""
        prompt = [5 + (number * 7 + at) % 200 for at in range(10 + number % 13)]
        answer = await self.ask("submit", prompt=prompt, max_tokens=max_tokens, seed=number, total_s=total_s)
        return str(answer["job"])

    async def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """All that is said to a command, in one."""
        said: dict[str, Any] = {}
        async for answer in self._said_to(do, **values):
            said |= answer
        return said

    async def read(self, job: str, into: Reading, first: int = 0) -> Reading:
        """From the token `first` on, until it ends or this edge does."""
        async for answer in self._said_to("read", job=job, first=first):
            tokens = answer.get("tokens", ())
            into.tokens += tokens
            into.times += [time.monotonic()] * len(tokens)
            into.finish = answer.get("finish") or into.finish
            into.error = answer.get("error", into.error)
            into.done = answer.get("done", False)
        return into

    async def kill(self) -> None:
        self._process.kill()
        await self.gone()

    async def stop(self) -> None:
        """It leaves its jobs to others and ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self.gone()

    async def gone(self) -> None:
        async with asyncio.timeout(20):
            await self._process.wait()
        await asyncio.gather(self._listening, return_exceptions=True)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def _said_to(self, do: str, **values: Any) -> AsyncIterator[dict[str, Any]]:
        number = next(self._numbers)
        answers = self._answers[number] = asyncio.Queue()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **values}).encode() + b"\n")
        while True:
            answer = await answers.get()
            if not answer:
                return  # the process is gone
            yield answer
            if answer.get("done"):
                return

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]].put_nowait(answer)
        for answers in self._answers.values():
            answers.put_nowait({})


@asynccontextmanager
async def edges(up: Up, folder: Path, *names: str) -> AsyncIterator[list[EdgeProcess]]:
    """One process a name, all over one database in `folder`."""
    password = json.loads((up.home / "nats" / "passwords.json").read_text())["edge"]
    made = []
    try:
        for name in names:
            identity = process_id(name, time.time(), SystemRandom())
            argv = ("-m", "tests.chaos.detached_edge", f"nats://127.0.0.1:{up.nats_port}", password, identity, str(folder))
            with (folder / f"{name}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *argv, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log
                )
            made.append(EdgeProcess(process, identity))
        for edge in made:
            await edge.ready()
        yield made
    finally:
        for edge in made:
            if edge.running:
                await edge.kill()
