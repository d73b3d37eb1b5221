"""Keys in a real database that three edges read: what a wrong one leaves behind, and how soon a change holds everywhere."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from schemas.job import Tier
from services.clock import SystemClock
from services.edge.api.app import create_app
from services.edge.gate import keyring, keys
from services.edge.gate.door import Door
from services.edge.gate.keyring import REFRESH_S, Keyring
from services.edge.gate.keys import new_key
from services.edge.store.database import Database, database_time, database_url
from services.edge.store.keys import SqlKeyStore
from services.edge.store.tables import api_keys
from services.edge.tenant import tenant
from tests.edge.fakes import SECRET, Api, Script
from tests.edge.migrated import migrated
from tests.edge.sse import read_stream
from tests.edge.test_api_keys import CHAT, ask
from tests.text.tiny import byte_ids
from tests.waiting import PATIENCE_S, until

PATH = "/v1/chat/completions"


class StoredApi(Api):
    """An edge whose keys are in `database`."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.keyring = Keyring(SqlKeyStore(database), SECRET, SystemClock())
        door = Door(self.keyring, lambda name: tenant(SECRET, name), open_on_loopback=False)
        self.app = create_app(self.served, self.traffic, door, lambda: "req-made")


async def made(database: Database, **about: Any) -> str:
    """The text of a new key."""
    key = new_key(SECRET, secrets.token_bytes)
    await SqlKeyStore(database).create(key.id, key.digest, "acme", **about)
    return key.text


@pytest.fixture
async def databases(tmp_path: Path) -> AsyncIterator[list[Database]]:
    """One file, opened by each edge for itself."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(migrated(database_url("", tmp_path))) for _ in range(3)]


def wrong(right: str, revoked: str) -> list[list[tuple[bytes, bytes]]]:
    """Header lists that name nobody: no key, one that is none, one that ended, and a good one twice."""
    unknown = "hr-" + "a" * 16 + "-" + "b" * 52
    values = [
        "",
        f"{right}a",
        f"Bearer {right[:-1]}{'a' if right[-1] != 'a' else 'b'}",
        f"bearer {unknown}",
        f"BEARER  {unknown}",
        f"Basic {unknown}",
        f"Bearer {revoked}",
        "Bearer hr-" + "x" * 100_000,
        "Bearer hr-' OR 1=1; DROP TABLE api_keys; --",
        f'Bearer "{right}"',
        f"Bearer {right}'",
        "Bearer hr-é🙂",
    ]
    each = [[(b"authorization", value.encode())] for value in values]
    return [[], *each, [(b"authorization", f"Bearer {right}".encode())] * 2]


async def test_a_wrong_key_is_401_on_one_path_and_leaves_nothing_behind(
    databases: list[Database], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faults.md, gateway: Authorization: every kind is the same 401, no database write, no key in a log. Whatever looks like
    a key is compared once and in constant time, whether or not it is known."""
    right, revoked = await made(databases[0]), await made(databases[0])
    await SqlKeyStore(databases[0]).end(keys.key_id(revoked) or "")
    api, compared = StoredApi(databases[0]), 0

    def same(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return keys.same(one, other)

    monkeypatch.setattr(keyring, "same", same)
    caplog.set_level(logging.DEBUG)
    watcher = sqlite3.connect(tmp_path / "edge.db")
    before = watcher.execute("PRAGMA data_version").fetchone()
    async with api.client() as client:
        for headers in wrong(right, revoked):
            was, answer = compared, await client.post(PATH, json=CHAT, headers=headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (401, "invalid_api_key", None), headers
            shown = headers[0][1].split()[-1] if len(headers) == 1 and headers[0][1] else b""
            if shown.startswith(b"hr-") and len(shown) <= 256:
                assert compared == was + 1
            assert len(shown) < 8 or shown[3:60].decode("latin-1") not in answer.text + caplog.text
        assert (await client.post(PATH, json=CHAT, headers={"authorization": f"bearer {right}"})).status_code == 200
    assert watcher.execute("PRAGMA data_version").fetchone() == before
    watcher.close()
    assert len(api.jobs.handles) == 1
    assert right[20:] not in caplog.text + api.metrics.prometheus_text().decode()


async def test_a_change_holds_at_every_edge_and_spares_what_runs(databases: list[Database]) -> None:
    """faults.md, gateway: a key revoked or its tier lowered mid-stream. A stream goes on to its end as it began; the next request
    meets the change at each edge, which looks every 2 s (the case allows 5)."""
    assert REFRESH_S <= 2.0
    doomed, lowered = await made(databases[0], tier=Tier.ENTERPRISE), await made(databases[0], tier=Tier.ENTERPRISE)
    edges, go = [StoredApi(database) for database in databases], asyncio.Event()
    for edge in edges:
        assert (await ask(edge, "/v1/models", doomed)).status_code == 200
        edge.jobs.scripts = [Script([byte_ids("hello")], go=go) for _ in range(2)]
    asked = [(edge, key) for edge in edges for key in (doomed, lowered)]
    streams = [asyncio.create_task(ask(edge, PATH, key, body=CHAT | {"stream": True})) for edge, key in asked]
    await until(lambda: all(len(edge.jobs.handles) == 2 and edge.jobs.handles[1].waiting.is_set() for edge in edges))
    await SqlKeyStore(databases[0]).end(keys.key_id(doomed) or "")
    async with databases[1].write() as connection:
        free = sa.update(api_keys).where(api_keys.c.id == keys.key_id(lowered))
        await connection.execute(free.values(tier=Tier.FREE, changed=database_time()))
    looking = [asyncio.create_task(edge.keyring.run()) for edge in edges]
    try:
        async with asyncio.timeout(PATIENCE_S):
            for edge in edges:
                while (await ask(edge, PATH, doomed, body=CHAT)).status_code != 401:  # noqa: ASYNC110 - told in answers only
                    await asyncio.sleep(0.02)
                while await _tier(edge, lowered) is not Tier.FREE:  # noqa: ASYNC110 - the same
                    await asyncio.sleep(0.02)
    finally:
        for task in looking:
            task.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
    go.set()
    for stream in streams:
        assert read_stream((await stream).content).content == "hello"


async def _tier(edge: Api, key: str) -> Tier:
    """Of its next request."""
    assert (await ask(edge, PATH, key, body=CHAT)).status_code == 200
    return edge.jobs.draft.tier
