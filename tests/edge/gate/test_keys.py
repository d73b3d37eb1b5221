"""Keys: how they look, what is kept of them, and how an edge keeps up with the database."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from schemas.errors import InvalidApiKey, StoreUnavailable
from services.clock import ManualClock
from services.edge.gate import keyring
from services.edge.gate.keyring import Keyring
from services.edge.gate.keys import digest, key_id, new_key
from services.edge.gate.records import KeyRecord
from tests.edge.fakes import SECRET, FakeKeys
from tests.waiting import PATIENCE_S, until


def test_a_key_names_its_row_and_nothing_stored_opens_the_door() -> None:
    made = new_key(SECRET, secrets.token_bytes)
    assert key_id(made.text) == made.id
    assert made.digest == digest(SECRET, made.text)
    assert made.digest != digest(b"y" * 32, made.text)
    assert made.text not in repr(made.digest)
    assert new_key(SECRET, secrets.token_bytes).text != made.text


@pytest.mark.parametrize(
    "text", ["", "hr-", "sk-abc", "hr-a-b", "hr-" + "a" * 16 + "-" + "1" * 52, "hr-" + "a" * 16 + "-" + "a" * 53]
)
def test_what_is_no_key(text: str) -> None:
    assert key_id(text) is None


class Ring:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.keys = FakeKeys()
        self.ring = Keyring(self.keys, SECRET, self.clock)

    async def refused(self, text: str) -> bool:
        try:
            await self.ring.check(text)
        except InvalidApiKey:
            return True
        return False

    async def until_refused(self, text: str) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not await self.refused(text):
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.005)


async def test_a_key_is_looked_up_once() -> None:
    ring = Ring()
    text = ring.keys.make(tenant="acme")
    for _ in range(3):
        assert (await ring.ring.check(text)).tenant == "acme"
    assert ring.keys.asked == 1


async def test_the_right_id_with_a_wrong_secret() -> None:
    ring = Ring()
    text = ring.keys.make()
    assert await ring.refused(text[:-1] + ("a" if text[-1] != "a" else "b"))
    assert not await ring.refused(text)


async def test_an_unknown_key_is_not_looked_up_on_every_request() -> None:
    ring = Ring()
    made = new_key(SECRET, secrets.token_bytes)
    for _ in range(3):
        assert await ring.refused(made.text)
    assert ring.keys.asked == 1
    ring.clock.advance(3.0)
    assert await ring.refused(made.text)
    assert ring.keys.asked == 2


async def test_a_key_that_expires() -> None:
    ring = Ring()
    text = ring.keys.make(expires=ring.clock.wall() + 10.0)
    assert not await ring.refused(text)
    ring.clock.advance(11.0)
    assert await ring.refused(text)


async def test_a_revoked_key_is_refused_once_the_edge_has_looked() -> None:
    ring = Ring()
    text = ring.keys.make()
    await ring.ring.check(text)
    ring.keys.change(text, revoked=ring.clock.wall(), changed=1.0)
    task = asyncio.create_task(ring.ring.run())
    try:
        await ring.until_refused(text)
    finally:
        task.cancel()


async def test_without_the_database_known_keys_go_on_and_unknown_ones_are_not_called_wrong() -> None:
    ring = Ring()
    known, other = ring.keys.make(), ring.keys.make()
    await ring.ring.check(known)
    ring.keys.down = True
    task = asyncio.create_task(ring.ring.run())
    try:
        await until(lambda: ring.keys.asked >= 2)
        assert not await ring.refused(known)
        with pytest.raises(StoreUnavailable):
            await ring.ring.check(other)
        assert not task.done()
    finally:
        task.cancel()


async def test_a_failure_nobody_foresaw_does_not_end_the_keeping_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a key revoked afterwards would be let in for ever."""
    monkeypatch.setattr(keyring, "REFRESH_S", 0.01)
    ring = Ring()
    text = ring.keys.make()
    await ring.ring.check(text)
    failures = 0

    async def fail(_when: float) -> list[KeyRecord]:
        nonlocal failures
        failures += 1
        raise ValueError("a row that this version cannot read")

    with monkeypatch.context() as broken:
        broken.setattr(ring.keys, "changed_since", fail)
        task = asyncio.create_task(ring.ring.run())
        await until(lambda: failures > 1 or task.done())
    try:
        ring.keys.change(text, revoked=ring.clock.wall(), changed=1.0)
        await ring.until_refused(text)
    finally:
        task.cancel()


async def test_a_row_that_cannot_be_read_is_neither_accepted_nor_called_wrong_and_hides_no_other() -> None:
    """A newer build changed one key and revoked another one: the first is unknown here, the second is refused."""
    ring = Ring()
    changed, revoked = ring.keys.make(), ring.keys.make()
    for text in (changed, revoked):
        await ring.ring.check(text)
    ring.keys.unreadable.add(key_id(changed) or "")
    ring.keys.change(changed, changed=1.0)
    ring.keys.change(revoked, revoked=ring.clock.wall(), changed=2.0)
    task = asyncio.create_task(ring.ring.run())
    try:
        await ring.until_refused(revoked)
        with pytest.raises(StoreUnavailable):
            await ring.ring.check(changed)
    finally:
        task.cancel()
