"""What NATS accounts may do, and how an edge keeps up with it."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import StoreUnavailable
from schemas.job import Tier
from services.clock import ManualClock
from services.edge.gate import accounts as module
from services.edge.gate.accounts import Accounts
from services.edge.gate.limits import NONE, Limits
from services.edge.gate.records import ANY, AccountRecord, Unreadable
from services.edge.tenant import tenant
from tests.edge.fakes import SECRET, FakeAccounts
from tests.waiting import until

FREE = AccountRecord("acme", Tier.FREE, frozenset({"m"}), Limits(requests_per_minute=5))


@pytest.fixture
def store() -> FakeAccounts:
    return FakeAccounts()


@pytest.fixture
def accounts(store: FakeAccounts, monkeypatch: pytest.MonkeyPatch) -> Accounts:
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    return Accounts(store, lambda name: tenant(SECRET, name), ManualClock())


async def test_an_account_is_a_tenant_with_a_tier_models_and_limits(store: FakeAccounts, accounts: Accounts) -> None:
    store.told(FREE)
    caller = await accounts.caller("acme")
    assert (caller.tenant, caller.tier, caller.key) == (tenant(SECRET, "nats:acme"), Tier.FREE, "")
    assert (caller.models, caller.tenant_limits, caller.limits) == (FREE.models, FREE.limits, NONE)


async def test_an_account_that_was_told_nothing(store: FakeAccounts, accounts: Accounts) -> None:
    assert (await accounts.caller("acme")).tenant_limits == NONE
    assert (await accounts.caller("acme")).tier is Tier.PAID


async def test_all_others(store: FakeAccounts, accounts: Accounts) -> None:
    store.told(FREE, AccountRecord(ANY, Tier.PAID, None, Limits(concurrent=1)))
    assert (await accounts.caller("acme")).tenant_limits == FREE.limits
    other = await accounts.caller("zenith")
    assert (other.tenant.name, other.tenant_limits) == ("nats:zenith", Limits(concurrent=1))


async def test_what_is_changed_holds_soon_and_the_database_is_not_asked_for_each_request(
    store: FakeAccounts, accounts: Accounts
) -> None:
    for _ in range(5):
        await accounts.caller("acme")
    assert store.asked == 1
    store.told(FREE)
    task = asyncio.create_task(accounts.run())
    try:
        await until(lambda: store.asked >= 3)
        assert (await accounts.caller("acme")).tier is Tier.FREE
    finally:
        task.cancel()


async def test_without_the_database_what_is_known_goes_on_and_nobody_is_unlimited_by_chance(
    store: FakeAccounts, accounts: Accounts
) -> None:
    store.told(FREE)
    store.down = True
    with pytest.raises(StoreUnavailable):
        await accounts.caller("acme")
    store.down = False
    await accounts.caller("acme")
    store.down = True
    task = asyncio.create_task(accounts.run())
    try:
        await until(lambda: store.asked >= 5)
        assert (await accounts.caller("acme")).tier is Tier.FREE
        assert not task.done()
    finally:
        task.cancel()


async def test_a_row_that_cannot_be_read_stops_its_account_only(store: FakeAccounts, accounts: Accounts) -> None:
    store.records = {"acme": Unreadable("acme"), "zenith": AccountRecord("zenith", Tier.FREE)}
    with pytest.raises(StoreUnavailable):
        await accounts.caller("acme")
    assert (await accounts.caller("zenith")).tier is Tier.FREE
