"""Keys and limits as rows."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from random import Random

import pytest
import sqlalchemy as sa

from schemas.errors import InvalidApiKey, StoreUnavailable
from schemas.job import Tier
from services.clock import SystemClock
from services.edge.gate import keyring
from services.edge.gate.keyring import REFRESH_S, Keyring
from services.edge.gate.keys import new_key
from services.edge.gate.limits import Limits
from services.edge.gate.records import KeyRecord, Unreadable
from services.edge.store.database import Database
from services.edge.store.keys import SqlKeyStore
from services.edge.store.tables import api_keys
from tests.waiting import PATIENCE_S

DIGEST = b"d" * 32


async def test_a_key_there_and_back(database: Database) -> None:
    keys = SqlKeyStore(database)
    limits = Limits(requests_per_minute=5)
    await keys.create("a", DIGEST, "acme", name="ci", tier=Tier.FREE, models=frozenset({"m"}), limits=limits, valid_s=60.0)
    record = await keys.get("a")
    assert record is not None
    assert (record.digest, record.tenant, record.name, record.tier) == (DIGEST, "acme", "ci", Tier.FREE)
    assert (record.models, record.limits, record.revoked) == (frozenset({"m"}), limits, None)
    assert record.expires is not None
    assert 59 < record.expires - record.created < 61
    assert await keys.get("b") is None


async def test_the_list_is_in_order_and_can_be_of_one_tenant(database: Database) -> None:
    keys = SqlKeyStore(database)
    for key, tenant in (("a", "acme"), ("b", "zenith"), ("c", "acme")):
        await keys.create(key, DIGEST, tenant)
    assert [record.id for record in await keys.all()] == ["a", "b", "c"]
    assert [record.id for record in await keys.all("acme")] == ["a", "c"]


async def test_what_changed_is_told(database: Database) -> None:
    keys = SqlKeyStore(database)
    await keys.create("a", DIGEST, "acme")
    await keys.create("b", DIGEST, "acme")
    (_, newest) = await keys.changed_since(0.0)
    assert await keys.end("a")
    ended = await keys.get("a")
    assert ended is not None
    assert ended.revoked is not None
    assert "a" in [record.id for record in await keys.changed_since(newest.changed)]
    assert not await keys.changed_since(ended.changed + 1.0)


@pytest.mark.parametrize("grace_s", [0.0, 0.1])
async def test_every_edge_refuses_what_was_ended_anywhere(
    database: Database, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revoked, or rotated with a grace; two edges that had let it in keep up with the database as in a process."""
    secret, keys = b"s" * 32, SqlKeyStore(database)
    made, other = (new_key(secret, Random(seed).randbytes) for seed in (1, 2))
    for key in (made, other):
        await keys.create(key.id, key.digest, "acme")
    edges = [Keyring(SqlKeyStore(database), secret, SystemClock()) for _ in range(2)]
    for edge in edges:
        assert (await edge.check(made.text)).id == made.id

    async def refused(edge: Keyring) -> None:
        with suppress(InvalidApiKey):
            while await edge.check(made.text):  # noqa: ASYNC110 - told in answers only
                await asyncio.sleep(0.01)

    monkeypatch.setattr(keyring, "REFRESH_S", 0.05)
    keeping_up = [asyncio.create_task(edge.run()) for edge in edges]
    await keys.end(made.id, grace_s)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(refused, edges))
    for edge in edges:
        assert (await edge.check(other.text)).id == other.id
    for task in keeping_up:
        task.cancel()


def test_keys_are_looked_at_often_enough_for_what_is_promised() -> None:
    """A revoked key is refused within 5 s: so long takes a look, and the query after it."""
    assert REFRESH_S <= 2.5


async def test_an_end_is_final(database: Database) -> None:
    keys = SqlKeyStore(database)
    await keys.create("a", DIGEST, "acme")
    assert await keys.end("a")
    first = await keys.get("a")
    assert await keys.end("a", after_s=100.0)
    assert await keys.get("a") == first
    assert not await keys.end("none")


async def test_a_grace_never_makes_a_key_live_longer(database: Database) -> None:
    keys = SqlKeyStore(database)
    await keys.create("a", DIGEST, "acme", valid_s=1000.0)
    before = await keys.get("a")
    assert await keys.end("a", after_s=2000.0)
    assert await keys.get("a") == before
    await keys.end("a", after_s=1.0)
    sooner = await keys.get("a")
    assert sooner is not None
    assert before is not None
    assert (sooner.expires or 0) < (before.expires or 0)


async def test_a_tenants_limits_come_with_its_keys(database: Database) -> None:
    keys = SqlKeyStore(database)
    await keys.create("a", DIGEST, "acme")
    made = await keys.get("a")
    assert made is not None
    for limits in (Limits(tokens_per_minute=7), Limits(requests_per_minute=9)):
        await keys.limit_tenant("acme", limits)
        (record,) = await keys.changed_since(made.changed)
        assert isinstance(record, KeyRecord)
        assert record.tenant_limits == limits
    assert await keys.tenant_limits() == {"acme": Limits(requests_per_minute=9)}


@pytest.mark.parametrize(
    "written", [{"tier": "platinum"}, {"limits": '{"tokens_per_year": 5}'}, {"limits": "{"}, {"models": "5"}, {"models": "{"}]
)
async def test_a_row_of_another_build_hides_no_other(database: Database, written: dict[str, str]) -> None:
    """It is told apart from what is not there, and can be revoked."""
    keys = SqlKeyStore(database)
    for key in ("a", "b", "c"):
        await keys.create(key, DIGEST, "acme")
    async with database.write() as connection:
        await connection.execute(sa.update(api_keys).where(api_keys.c.id == "b").values(written))
    for found in (await keys.changed_since(0.0), await keys.all()):
        assert {record.id: isinstance(record, Unreadable) for record in found} == {"a": False, "b": True, "c": False}
    with pytest.raises(StoreUnavailable):
        await keys.get("b")
    assert await keys.end("b")
    assert await keys.get("a")
