"""Jobs that play a script, behind the HTTP layer as `services.edge.api.ports` sees them."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import httpx
from fastapi import FastAPI
from msgspec.structs import replace as altered

from schemas.errors import BusUnavailable, HeadraceError, StoreUnavailable
from schemas.explanation import Explanation
from schemas.job import Tier, unpack_ids
from schemas.reply import FinishReason, Logprob
from schemas.state import Capabilities, ModelCard
from services.bus.counters import Count
from services.clock import SystemClock
from services.edge.api.admin_app import create_admin_app
from services.edge.api.app import create_app
from services.edge.api.gate import Traffic
from services.edge.api.served import Served
from services.edge.gate.budgets import Budgets
from services.edge.gate.door import Door
from services.edge.gate.keyring import Keyring
from services.edge.gate.keys import key_id, new_key
from services.edge.gate.meter import Add, Meter
from services.edge.gate.purse import Ask, Got
from services.edge.gate.records import AccountRecord, Entry, KeyRecord, Unreadable
from services.edge.jobs.draft import Delta, Draft
from services.edge.jobs.explained import told
from services.edge.jobs.handle import JobCancelled
from services.edge.tenant import tenant
from services.edge.text_model import TextModel
from services.settings.edge import EdgeSettings
from services.settings.selection import SelectionSettings
from services.telemetry.metrics import Metrics
from services.text.assets import GenerationDefaults
from tests.text.tiny import TEMPLATE, byte_ids, tiny_template, tiny_tokenizer

MODEL = "tiny"
SECRET = b"x" * 32
CONTEXT = 512


@dataclass
class Script:
    """What becomes of the next job: `steps` of token ids, then `error`, `finish`, or silence for ever.

    `refuse` instead of admission; `admit` and `go`, when given, are waited for before admission and before the first step.
    """

    steps: Sequence[Sequence[int]] = ()
    finish: FinishReason | None = FinishReason.STOP
    error: HeadraceError | None = None
    refuse: HeadraceError | None = None
    began: bool = True
    """Whether a worker takes it."""
    admit: asyncio.Event | None = None
    go: asyncio.Event | None = None
    finish_with_last: bool = True
    explanation: Explanation | None = None
    """What a router would say to who asks."""
    deltas: Sequence[Sequence[Delta]] = ()
    """Instead of `steps`: what each look at a job of several choices gets."""
    pause_s: float = 0.0
    """Before each step."""
    forever: bool = False
    """The last step comes again and again."""


def says(*texts: str | bytes, finish: FinishReason | None = FinishReason.STOP) -> Script:
    """One step a text, one token a byte."""
    return Script([byte_ids(text) for text in texts], finish)


def logprob(token: int, alternatives: int) -> Logprob:
    """Told by the token, so that a test can tell whose an entry is."""
    top = tuple((token + place, -(token + place) / 1000) for place in range(alternatives))
    return Logprob(token=token, logprob=-token / 1000, top=top)


class FakeHandle:
    """Plays one script."""

    _ids = itertools.count(1)

    def __init__(self, draft: Draft, script: Script) -> None:
        self.draft = draft
        self.id = f"{next(self._ids):032x}"
        self.cached_tokens = 0
        self.began = script.began
        self.compute_s = 0.25
        self.explanation = told(script.explanation, draft.explain)
        self.done = False
        self.cancelled = asyncio.Event()
        self.stopped: list[int] = []
        self.waiting = asyncio.Event()
        self._script = script
        self._open = set(range(draft.n))
        self._deltas = self._play()

    async def admitted(self) -> None:
        await self._unless_cancelled(self._script.admit)
        if self._script.refuse is not None:
            raise self._script.refuse

    @property
    def prompt_logprobs(self) -> list[Logprob]:
        count = self.draft.sampling.prompt_logprobs
        return [] if count is None else [altered(logprob(token, count), rank=5) for token in unpack_ids(self.draft.prompt)[1:]]

    async def next(self, timeout: float) -> list[Delta]:
        if self.done:
            return []
        try:
            async with asyncio.timeout(timeout):
                await self._unless_cancelled(self._script.go)
                if not self._deltas and self._script.error is not None:
                    raise self._script.error
                if not self._deltas:
                    await self._unless_cancelled(asyncio.Event())
                await asyncio.sleep(self._script.pause_s)
        except TimeoutError:
            return []
        deltas = self._deltas[0] if self._script.forever else self._deltas.pop(0)
        if (count := self.draft.sampling.logprobs) is not None:
            deltas = [altered(delta, logprobs=[logprob(token, count) for token in delta.tokens]) for delta in deltas]
        self._open -= {delta.choice for delta in deltas if delta.finish is not None}
        self.done = not self._open
        return [delta for delta in deltas if delta.choice not in self.stopped]

    def cancel(self) -> None:
        if not self.done:
            self.cancelled.set()

    def stop(self, choice: int) -> None:
        if choice in self._open:
            self.stopped.append(choice)
            self._open.discard(choice)

    def _play(self) -> list[list[Delta]]:
        script = self._script
        if script.deltas:
            return [list(deltas) for deltas in script.deltas]
        deltas = [Delta(0, list(step)) for step in script.steps]
        if script.finish is not None and script.error is None:
            if deltas and script.finish_with_last:
                deltas[-1] = altered(deltas[-1], finish=script.finish)
            else:
                deltas.append(Delta(0, [], script.finish))
        return [[delta] for delta in deltas]

    async def _unless_cancelled(self, event: asyncio.Event | None) -> None:
        if event is not None and not event.is_set():
            self.waiting.set()
            waits = [asyncio.ensure_future(e.wait()) for e in (event, self.cancelled)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self.cancelled.is_set():
            raise JobCancelled


@dataclass
class FakeJobs:
    """`scripts` are taken in order, then `default`. `alive`: models with workers; `contexts`: theirs, where not `context`."""

    scripts: list[Script] = field(default_factory=list)
    default: Script = field(default_factory=lambda: says("hello"))
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(seed=True))
    connected: bool = True
    served: bool = True
    kv_tokens: int = 0
    context: int = CONTEXT
    handles: list[FakeHandle] = field(default_factory=list)
    alive: set[str] = field(default_factory=lambda: {MODEL})
    contexts: dict[str, int] = field(default_factory=dict)

    def start(self, draft: Draft) -> FakeHandle:
        handle = FakeHandle(draft, self.scripts.pop(0) if self.scripts else self.default)
        self.handles.append(handle)
        return handle

    def card(self, model: str) -> ModelCard | None:
        if not self.served or model not in self.alive:
            return None
        context = self.contexts.get(model, self.context)
        return ModelCard(model=model, capabilities=self.capabilities, context_length=context, kv_tokens=self.kv_tokens)

    def retry_after(self, model: str) -> float:
        return 3.0

    @property
    def draft(self) -> Draft:
        """The last one."""
        return self.handles[-1].draft


class OneMinute(SystemClock):
    """In which a whole test fits: what it counted is not forgotten between two of its requests."""

    def wall(self) -> float:
        return 1_700_000_000.0


class FakeCounters:
    """`services.bus.counters` in memory; `down`: JetStream cannot be reached."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, str, int]] = Counter()
        self.down = False

    async def __call__(self, kind: str, owner: str, window: int, amount: int) -> Count:
        await asyncio.sleep(0)
        if self.down:
            raise BusUnavailable("JetStream is down.")
        self.values[kind, owner, window] += amount
        return Count(self.values[kind, owner, window])


class FakeUsage:
    """A `UsageStore` in memory; `down`: the database cannot be reached. Leases never end."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.held: dict[tuple[str, str], dict[str, int]] = {}
        self.spent: Counter[tuple[str, str]] = Counter()
        self.down = False
        self.asked = 0

    async def exchange(
        self, edge: str, entries: Sequence[Entry], asks: Sequence[Ask], lease_s: float
    ) -> dict[tuple[str, str], Got]:
        self.asked += 1
        await asyncio.sleep(0)
        if self.down:
            raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)
        fresh = {entry.used.job: entry for entry in entries if entry.used.job not in self.entries}
        self.entries |= fresh
        answers = {}
        for ask in asks:
            key = ask.owner, ask.window
            self.spent[key] += sum(tokens for job, tokens in ask.charges.items() if job in fresh)
            held = self.held.setdefault(key, {})
            held.pop(edge, None)
            granted = max(0, min(ask.want, ask.limit - self.spent[key] - sum(held.values()) - ask.keep))
            held[edge] = ask.keep + granted
            answers[key] = Got(granted, self.spent[key])
        return answers


@dataclass
class FakeKeys:
    """A `KeyStore` in memory; `down`: the database cannot be reached; `unreadable`: rows of a newer build."""

    records: dict[str, KeyRecord] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    down: bool = False
    asked: int = 0

    def make(self, **fields: Any) -> str:
        """The text of a new key."""
        made = new_key(SECRET, Random(len(self.records)).randbytes)
        about: dict[str, Any] = {"tenant": "acme", "name": "", "tier": Tier.PAID, "models": None, "created": 0.0, **fields}
        self.records[made.id] = KeyRecord(id=made.id, digest=made.digest, **about)
        return made.text

    def change(self, text: str, **fields: Any) -> None:
        key = key_id(text)
        assert key is not None
        self.records[key] = replace(self.records[key], **fields)

    async def get(self, key: str) -> KeyRecord | None:
        self._ask()
        if key in self.unreadable:
            raise StoreUnavailable("This key's record cannot be read.", retry_after=1.0)
        return self.records.get(key)

    async def changed_since(self, when: float) -> list[KeyRecord | Unreadable]:
        self._ask()
        changed = [record for record in self.records.values() if record.changed >= when]
        return [Unreadable(each.id, each.changed) if each.id in self.unreadable else each for each in changed]

    def _ask(self) -> None:
        self.asked += 1
        if self.down:
            raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)


@dataclass
class FakeAccounts:
    """An `AccountStore` in memory; `down`: the database cannot be reached."""

    records: dict[str, AccountRecord | Unreadable] = field(default_factory=dict)
    down: bool = False
    asked: int = 0

    def told(self, *records: AccountRecord) -> None:
        self.records = {record.name: record for record in records}

    async def all(self) -> dict[str, AccountRecord | Unreadable]:
        self.asked += 1
        if self.down:
            raise StoreUnavailable("The database cannot be used now.", retry_after=1.0)
        return dict(self.records)


class Api:
    """The application over scripted jobs, and a client to it. `models`: all of one text, each with a temperature of its own."""

    def __init__(
        self,
        models: Sequence[str] = (MODEL,),
        selection: SelectionSettings | None = None,
        *,
        counters: Add | None = None,
        template: str = TEMPLATE,
        **settings: Any,
    ) -> None:
        self.jobs = FakeJobs(alive=set(models))
        self.traffic = Traffic()
        self.metrics = Metrics.collecting("edge-test")
        texts = {
            name: TextModel(name, tiny_tokenizer(), tiny_template(template), GenerationDefaults(temperature=1 - at / 10))
            for at, name in enumerate(models)
        }
        edge = EdgeSettings(**settings)
        self.counters = FakeCounters()
        self.usage = FakeUsage()
        clock = SystemClock()
        self.budgets = Budgets(self.usage, "edge-test", OneMinute(), self.metrics)
        meter = Meter(counters or self.counters, self.budgets, OneMinute(), self.metrics)
        about = (1_700_000_000, texts, selection or SelectionSettings())
        self.served = Served(edge, self.jobs, texts[models[0]], meter, clock, Random(3), self.metrics, *about)
        self.keys = FakeKeys()
        self.keyring = Keyring(self.keys, SECRET, SystemClock())
        door = Door(self.keyring, lambda name: tenant(SECRET, name), open_on_loopback=True)
        self.admin_app: FastAPI = create_admin_app(self.served, self.traffic)
        self.app: FastAPI = create_app(self.served, self.traffic, door, lambda: "req-made")

    @asynccontextmanager
    async def client(self, app: FastAPI | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """To `app`, or to what callers reach."""
        transport = httpx.ASGITransport(app or self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://edge", timeout=20) as client:
            yield client

    def counted(self) -> dict[tuple[str, str, str], int]:
        """Requests in the metrics, by model, outcome and status."""
        line = r'headrace_requests_total\{model="(.*)",outcome="(.*)",status="(.*)"\} (\S+)'
        found = re.findall(line, self.metrics.prometheus_text().decode())
        return {(model, outcome, status): int(float(count)) for model, outcome, status, count in found}

    async def call(self, path: str, **fields: object) -> httpx.Response:
        """Any endpoint; the model is ours unless `fields` say otherwise."""
        async with self.client() as client:
            return await client.post(path, json={"model": MODEL, **fields})

    async def post(self, body: object = None, **fields: object) -> httpx.Response:
        """A chat request: `body` as it is (bytes), or the smallest valid one with `fields`."""
        content = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        async with self.client() as client:
            if isinstance(body, bytes):
                headers = {"content-type": "application/json"}
                return await client.post("/v1/chat/completions", content=body, headers=headers)
            return await client.post("/v1/chat/completions", json=content if body is None else body)
