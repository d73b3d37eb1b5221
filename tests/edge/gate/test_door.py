"""Who is let in: by key, or from this machine's own loopback."""

from __future__ import annotations

import pytest

from schemas.errors import InvalidApiKey
from schemas.job import Tier
from services.clock import ManualClock
from services.edge.gate.door import Door
from services.edge.gate.keyring import Keyring
from services.edge.tenant import DEFAULT, tenant
from tests.edge.fakes import SECRET, FakeKeys

FAR, HERE = "203.0.113.7", "127.0.0.1"


class House:
    def __init__(self, *, open_on_loopback: bool = True) -> None:
        self.keys = FakeKeys()
        keyring = Keyring(self.keys, SECRET, ManualClock())
        self.door = Door(keyring, lambda name: tenant(SECRET, name), open_on_loopback=open_on_loopback)

    async def enter(self, value: str | None, peer: str | None, **headers: str) -> str:
        """The tenant that was let in, "" = nobody."""
        given = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
        if value is not None:
            given[b"authorization"] = value.encode()
        try:
            return (await self.door.enter(given, peer)).tenant.name
        except InvalidApiKey:
            return ""


@pytest.mark.parametrize("peer", [HERE, "::1", "127.8.8.8", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("value", [None, "Bearer unused", "Bearer ", "Basic x"])
async def test_loopback_needs_no_key(peer: str, value: str | None) -> None:
    assert await House().enter(value, peer) == DEFAULT


@pytest.mark.parametrize("peer", [FAR, "::ffff:203.0.113.7", "10.0.0.1", None, "", "localhost"])
@pytest.mark.parametrize("value", [None, "Bearer unused", "Bearer ", "Basic x", "Bearer " + "x" * 5000, "Bearer hr-\xe9"])
async def test_everybody_else_does(peer: str | None, value: str | None) -> None:
    assert await House().enter(value, peer) == ""


async def test_where_loopback_is_not_open() -> None:
    assert await House(open_on_loopback=False).enter(None, HERE) == ""


@pytest.mark.parametrize("header", ["forwarded", "x_forwarded_for", "x_forwarded_host", "x_forwarded_proto", "x_real_ip", "via"])
async def test_a_proxy_on_this_machine_makes_nobody_local(header: str) -> None:
    assert await House().enter(None, HERE, **{header: FAR}) == ""


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1.evil.example", "null", "", "http://[", "file://"])
async def test_a_web_page_of_another_site_is_not_local(origin: str) -> None:
    """A browser on this machine runs anybody's scripts, and tells whose."""
    assert await House().enter(None, HERE, origin=origin) == ""


@pytest.mark.parametrize("origin", ["http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]:8000"])
async def test_a_web_page_of_this_machine_is(origin: str) -> None:
    assert await House().enter(None, HERE, origin=origin) == DEFAULT


async def test_a_key_says_who_it_is() -> None:
    house = House()
    text = house.keys.make(tenant="acme", tier=Tier.ENTERPRISE, models=frozenset({"small"}))
    for peer in (FAR, HERE):
        caller = await house.door.enter({b"authorization": f"bearer  {text} ".encode()}, peer)
        assert (caller.tenant, caller.tier) == (tenant(SECRET, "acme"), Tier.ENTERPRISE)
        assert (caller.may_use("small"), caller.may_use("large")) == (True, False)


async def test_a_key_that_was_shown_is_checked_on_loopback_too() -> None:
    house = House()
    text = house.keys.make()
    assert await house.enter(f"Bearer {text[:-2]}aa", HERE) == ""
    for scheme in ("", "Basic ", "Token ", "bearer   "):
        assert await house.enter(f"{scheme}hr-wrong", HERE) == ""
