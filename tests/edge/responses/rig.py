"""The application with responses, over scripted jobs and a real SQLite file; the official SDK as its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from schemas.errors import NotFound
from schemas.state import Capabilities
from services.edge.detached.request import pack
from services.edge.gate.records import Bill
from services.edge.jobs.draft import Draft
from services.edge.responses.routes import add_responses
from services.edge.store.database import Database
from services.edge.store.records import Facts, JobState, StoredJob
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api, FakeHandle, Script, says


@dataclass
class DetachedJob:
    draft: Draft
    tenant: str
    script: Script
    bill: Bill
    over: Callable[[int], None]
    state: JobState = JobState.RUNNING
    readers: list[FakeHandle] = field(default_factory=list)


class FakeDetached:
    """Detached jobs that play scripts: every reader gets the whole one. What was cancelled is in `cancelled`."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.default = says("hello")
        self.jobs: dict[str, DetachedJob] = {}
        self.cancelled: list[str] = []
        self.undone: list[str] = []

    async def submit(self, draft: Draft, tenant: str, bill: Bill, over: Callable[[int], None]) -> str:
        script = self.scripts.pop(0) if self.scripts else self.default
        if script.refuse is not None:
            raise script.refuse
        job = f"d{len(self.jobs) + 1:031x}"
        self.jobs[job] = DetachedJob(draft, tenant, script, bill, over)
        return job

    async def attach(self, job: str, tenant: str) -> FakeHandle:
        found = self._find(job, tenant)
        reader = FakeHandle(found.draft, found.script)
        reader.id = job
        found.readers.append(reader)
        return reader

    def end(self, job: str, used_tokens: int) -> None:
        """Its end is in its row."""
        self.jobs[job].state = JobState.FINISHED
        self.jobs[job].over(used_tokens)

    async def undo(self, job: str, tenant: str) -> None:
        self.undone.append(job)
        await self.delete(job, tenant)

    async def find(self, job: str, tenant: str) -> StoredJob:
        found = self._find(job, tenant)
        return StoredJob(job, found.state, pack(found.draft), 0.0, "e", Facts(owned=True))

    async def cancel(self, job: str, tenant: str) -> None:
        found = self._find(job, tenant)
        self.cancelled.append(job)
        for reader in found.readers:
            reader.cancel()

    async def delete(self, job: str, tenant: str) -> None:
        await self.cancel(job, tenant)
        del self.jobs[job]

    def _find(self, job: str, tenant: str) -> DetachedJob:
        found = self.jobs.get(job)
        if found is None or found.tenant != tenant:
            raise NotFound("There is no such job.")
        return found


class ResponsesApi(Api):
    """`Api` with responses. Close its background readers at the end."""

    def __init__(self, database: Database, detached: FakeDetached | None = None, **about: Any) -> None:
        super().__init__(**about)
        self.jobs.capabilities = Capabilities(seed=True, grammar=KINDS, logprobs=True)
        self.jobs.context = 4096
        self.detached = detached or FakeDetached()
        self.background = add_responses(self.app, self.served, self.detached, database)

    @asynccontextmanager
    async def sdk(self, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with (
            httpx.AsyncClient(transport=transport) as http,
            AsyncOpenAI(base_url="http://edge/v1", api_key=key, http_client=http, max_retries=0) as client,
        ):
            yield client

    async def ask(self, method: str, path: str, key: str = "", **fields: Any) -> httpx.Response:
        """Any endpoint; `fields` are the body."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with self.client() as client:
            return await client.request(method, path, json=fields or None, headers=headers)

    async def respond(self, key: str = "", **fields: Any) -> httpx.Response:
        """A response, by default to "hi"."""
        return await self.ask("POST", "/v1/responses", key, **{"model": MODEL, "input": "hi", **fields})
