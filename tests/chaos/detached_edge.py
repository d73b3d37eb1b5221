"""python -m tests.chaos.detached_edge URL PASSWORD PROCESS FOLDER: an edge without HTTP, for jobs that have no API yet.

It is composed as `services.edge.service` does it, its database in FOLDER. Commands come as JSON lines on standard input, what
becomes of each goes to standard output under the command's `id`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from random import SystemRandom
from typing import Any

from schemas.errors import HeadraceError
from schemas.job import Sampling, pack_ids
from schemas.subjects import Subjects
from services.bus.jetstream import JetStream
from services.bus.jetstream_queue import JetStreamWorkQueue
from services.bus.nats_bus import Credentials, connect
from services.clock import SystemClock
from services.edge.detached.jobs import DetachedJobs
from services.edge.jobs.draft import Draft, Limits
from services.edge.jobs.handle import JobCancelled
from services.edge.jobs.supervisor import Supervisor
from services.edge.store.database import Database, database_url
from services.edge.store.jobs import SqlJobStore
from services.edge.store.migrate import migrate
from services.telemetry.logs import configure
from services.telemetry.metrics import Metrics

TENANT = "t"


class Commands:
    def __init__(self, jobs: DetachedJobs, model: str) -> None:
        self._jobs = jobs
        self._model = model

    async def submit(self, say: Any, prompt: list[int], max_tokens: int, seed: int, total_s: float) -> None:
        sampling = Sampling(seed=seed, max_tokens=max_tokens)
        draft = Draft(self._model, pack_ids(prompt), sampling, Limits(30.0, 120.0, total_s), lane=0, salt=b"s")
        say(job=await self._jobs.submit(draft, TENANT))

    async def read(self, say: Any, job: str, first: int) -> None:
        reader = await self._jobs.attach(job, TENANT, {0: first})
        while not reader.done:
            for delta in await reader.next(1.0):
                say(tokens=delta.tokens, finish=delta.finish)

    async def cancel(self, say: Any, job: str) -> None:
        await self._jobs.cancel(job, TENANT)

    async def delete(self, say: Any, job: str) -> None:
        await self._jobs.delete(job, TENANT)

    async def find(self, say: Any, job: str) -> None:
        row = await self._jobs.find(job, TENANT)
        say(state=row.state, edge=row.edge, attempt=row.facts.attempt)

    async def run(self, line: bytes) -> None:
        command = json.loads(line)
        say = partial(_say, command.pop("id"))
        try:
            await getattr(self, command.pop("do"))(say, **command)
            say(done=True)
        except JobCancelled:
            say(error="cancelled", done=True)
        except HeadraceError as error:
            say(error=error.code, status=error.status, done=True)


async def main(url: str, password: str, process: str, folder: str) -> None:
    configure("INFO", process)
    clock, metrics, random = SystemClock(), Metrics.null(), SystemRandom()
    bus = await connect(url, process, "edge", credentials=Credentials("edge", password), clock=clock, metrics=metrics)
    subjects, database = Subjects(), Database(database_url("", Path(folder)))
    supervisor = Supervisor(bus, JetStreamWorkQueue(JetStream(bus), subjects), subjects, clock, random, metrics)
    await supervisor.open()
    jobs = DetachedJobs(SqlJobStore(database), partial(migrate, database), supervisor, bus, subjects, clock, random, metrics)
    await jobs.open()
    while not (jobs.ready and supervisor.models.models()):  # noqa: ASYNC110 - neither tells
        await asyncio.sleep(0.02)
    _say(0, ready=True)
    commands = Commands(jobs, supervisor.models.models()[0])
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    running = set()
    while line := await stdin.readline():
        task = asyncio.create_task(commands.run(line))
        running.add(task)
        task.add_done_callback(running.discard)
    await jobs.close()
    await supervisor.close(2.0)
    await database.close()
    await bus.drain(2.0)


def _say(number: int, **values: Any) -> None:
    print(json.dumps({"id": number, **values}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
