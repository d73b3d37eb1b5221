"""KV cache events become our identities: what fits one tenant's chain is published, what is ambiguous is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.state import Role
from services.engine.trtllm_engine import chains
from services.engine.trtllm_engine.mirror import Mirror
from services.kv.hashing import block_hashes, chain_root
from services.kv.prefix import CacheEvents
from tests.engine.trtllm_engine.double import World
from tests.engine.trtllm_engine.rig import engines, spec
from tests.waiting import until

A, B = chain_root("k", b"a"), chain_root("k", b"b")
IDS = list(range(20, 32))


def names(root: bytes, ids: list[int] = IDS) -> list[bytes]:
    return block_hashes(ids, 4, root)


class Events:
    """Says events as the engine does."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.number = 0

    def say(self, data: dict[str, Any], window: int = 4096, **more: Any) -> None:
        self.mirror.on_event({"event_id": self.number, "data": data, "window_size": window, **more})
        self.number += 1

    def stored(self, first: int, ids: list[int], parent: int | None = None, extra: int = 0, window: int = 4096) -> None:
        """Blocks under the engine's hashes `first`, `first`+1, …; the last one may be partial."""
        parts = [ids[start : start + 4] for start in range(0, len(ids), 4)]
        blocks = [
            {"block_hash": first + at, "tokens": [{"token_id": token, "token_extra_id": extra} for token in part]}
            for at, part in enumerate(parts)
        ]
        self.say({"type": "stored", "parent_hash": parent, "blocks": blocks}, window)

    def removed(self, *hashes: int) -> None:
        self.say({"type": "removed", "block_hashes": list(hashes)})


def told() -> tuple[Mirror, Events]:
    mirror = Mirror(4)
    events = Events(mirror)
    events.say({"type": "created", "num_blocks_per_cache_level": [9, 0]})
    return mirror, events


def test_a_chain_that_one_tenant_has_is_published_and_withdrawn() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS)
    assert mirror.drain_events().stored == tuple(names(A))
    assert len(mirror.match(names(A))) == 3
    assert mirror.identities(range(3)) == names(A)
    events.removed(102, 77)
    assert mirror.drain_events().removed == (names(A)[2],)
    assert len(mirror.match(names(A))) == 2


def test_what_several_tenants_may_have_is_not_published_nor_what_follows() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    mirror.expect(B, IDS)
    events.stored(100, IDS)
    assert mirror.drain_events().stored == ()
    events.removed(100, 101, 102)


def test_the_second_tenants_block_is_known_when_the_firsts_is() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS)
    mirror.expect(B, IDS)
    events.stored(200, IDS)
    assert mirror.drain_events().stored == (*names(A), *names(B))


def test_a_chain_goes_on_from_a_known_parent_as_far_as_a_request_is_known() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS[:4])
    events.stored(101, IDS[4:8], parent=100)
    events.stored(150, [1, 2, 3, 4], parent=100)  # nobody's
    events.stored(160, IDS[8:], parent=999)  # of a parent that was never heard of
    assert mirror.drain_events().stored == tuple(names(A)[:2])


def test_partial_blocks_pictures_and_other_windows_are_not_published() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS[:6])
    assert mirror.drain_events().stored == tuple(names(A)[:1])
    mirror.expect(B, IDS)
    events.stored(200, IDS[:4], extra=5)
    events.stored(300, IDS[:4], window=128)
    events.removed(101)
    assert mirror.drain_events() == CacheEvents()


def test_a_gap_clears_everything_and_raises_the_epoch() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS)
    mirror.drain_events()
    events.number += 1
    events.removed(500)
    assert mirror.epoch == 1
    assert mirror.drain_events().removed == tuple(names(A))
    events.stored(101, IDS[4:8], parent=100)  # its parent is not known any more
    assert mirror.drain_events().stored == ()
    events.stored(100, IDS)
    assert mirror.drain_events().stored == tuple(names(A))


def test_ranks_count_their_events_apart() -> None:
    mirror, events = told()
    for rank in (1, 2, 1, 2):
        number = (rank == 1) * 1000 + events.number // 2
        mirror.on_event({"event_id": number, "data": {"type": "updated"}, "attention_dp_rank": rank})
        events.number += 1
    assert mirror.epoch == 0


def test_the_same_block_stored_again_is_there_once() -> None:
    mirror, events = told()
    mirror.expect(A, IDS)
    events.stored(100, IDS)
    events.stored(100, IDS)
    events.removed(100, 101, 102)
    assert mirror.match(names(A)) == []


def test_what_two_adapters_of_one_tenant_may_have_stored_is_not_published() -> None:
    """The events of 1.2.1 do not say whose adapter computed a block."""
    mirror, events = told()
    mirror.expect(A, IDS)
    mirror.expect(chain_root("k", b"a", "sql"), IDS)
    events.stored(100, IDS)
    assert mirror.drain_events().stored == ()


def test_no_more_is_published_than_can_be_paged() -> None:
    """An engine that keeps blocks in the host's memory too has more of them than its pool."""
    mirror, events = told()
    mirror.most = 2
    mirror.expect(A, IDS)
    events.stored(100, IDS)
    assert len(mirror.match(names(A))) == 2
    assert mirror.identities(range(2)) == names(A)[:2]


def test_old_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "RECENT_BLOCKS", 6)
    mirror, events = told()
    for start in range(5):
        mirror.expect(A, [start] * 12)
    events.stored(100, [0] * 12)
    events.stored(200, [4] * 12)
    assert mirror.drain_events().stored == tuple(names(A, [4] * 12))


@pytest.mark.parametrize("junk", [None, 3, "{}", {}, {"event_id": 1}, {"event_id": 1, "data": {"type": "stored"}}])
def test_junk_is_named(junk: Any) -> None:
    with pytest.raises(ValueError):
        Mirror(4).on_event(junk)


def test_events_may_come_as_json() -> None:
    mirror, _ = told()
    mirror.on_event(json.dumps({"event_id": 1, "data": {"type": "removed", "block_hashes": [2**63 + 7]}}))
    assert mirror.epoch == 0


async def test_the_engines_events_are_the_workers_index() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        both.engine.prefill(spec(1, IDS), then_decode=True)
        await until(lambda: 1 in both.ended)
        expected = block_hashes([*IDS, *both.tokens(1)[:-1]], 4, chain_root("k", b""))
        await until(lambda: len(both.engine.pool.prefix.match(expected)) >= 3)
        world.drop_events = 1
        both.engine.prefill(spec(2, [99] * 12), then_decode=True)
        await until(lambda: both.engine.pool.prefix.match(expected) == [])
