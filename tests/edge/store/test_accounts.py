"""What NATS accounts may do, as rows."""

from __future__ import annotations

import sqlalchemy as sa

from schemas.job import Tier
from services.edge.gate.limits import Limits
from services.edge.gate.records import ANY, AccountRecord, Unreadable
from services.edge.store.accounts import SqlAccountStore
from services.edge.store.database import Database
from services.edge.store.tables import nats_accounts

ACME = AccountRecord("acme", Tier.FREE, frozenset({"m"}), Limits(tokens_per_day=7))


async def test_there_and_back_and_gone(database: Database) -> None:
    accounts = SqlAccountStore(database)
    assert await accounts.all() == {}
    await accounts.set(AccountRecord("acme", Tier.PAID))
    await accounts.set(ACME)
    await accounts.set(AccountRecord(ANY, Tier.ENTERPRISE))
    assert await accounts.all() == {"acme": ACME, ANY: AccountRecord(ANY, Tier.ENTERPRISE)}
    assert await accounts.delete("acme")
    assert not await accounts.delete("acme")
    assert list(await accounts.all()) == [ANY]


async def test_a_row_of_another_build_hides_no_other(database: Database) -> None:
    accounts = SqlAccountStore(database)
    await accounts.set(ACME)
    await accounts.set(AccountRecord("zenith", Tier.PAID))
    async with database.write() as connection:
        await connection.execute(sa.update(nats_accounts).where(nats_accounts.c.name == "zenith").values(tier="platinum"))
    assert await accounts.all() == {"acme": ACME, "zenith": Unreadable("zenith")}
