"""TensorRT-LLM's reusable blocks, under our identities: its KV cache events matched with the chains of recent requests.

An event has token ids and the engine's own hashes, but no tenant. So a block is known only as a link of a chain that a recent
request of ours is known to have; what fits several tenants' chains is ambiguous, and is not published, nor is what follows it.
Invariant: what is published was stored by the engine and not removed, as far as no event was missed; a gap in their numbers
clears everything.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.job import pack_ids
from services.kv.hashing import block_hashes, chain
from services.kv.prefix import CacheEvents

RECENT_BLOCKS = 2**17
"""Of recent requests' chains; 2 million tokens at 16 a block."""


@dataclass(frozen=True, slots=True)
class _Link:
    """A published block: the root of its chain, and its identity."""

    root: bytes
    identity: bytes


class Mirror:
    """A `PrefixCache` that only shows. Its blocks are numbers for paging, no memory. `epoch` counts how often it was cleared."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains = _Chains(block_tokens)
        self._links: dict[int, _Link | None] = {}
        """By the engine's hash; None = there, but not published."""
        self._slots = _Slots()
        self._next_event: dict[int, int] = {}
        self._window = 0
        self.epoch = 0

    # what the adapter says

    def expect(self, root: bytes, ids: Sequence[int]) -> None:
        """A request computes or has computed `ids`, under the chain that begins with `root`."""
        self._chains.add(root, ids)

    def on_event(self, item: Any) -> None:
        """One item of `get_kv_cache_events_async`, an object or its JSON. Raises ValueError for what is none."""
        try:
            event = json.loads(item) if isinstance(item, str | bytes) else item
            number, data = int(event["event_id"]), event["data"]
            self._must_be_next(int(event.get("attention_dp_rank") or 0), number)
            match data["type"]:
                case "created":
                    self._window = max(self._window, int(event.get("window_size") or 0))
                case "stored" if int(event.get("window_size") or self._window) >= self._window:
                    self._stored(data["parent_hash"], data["blocks"])
                case "removed":
                    for block_hash in data["block_hashes"]:
                        self._remove(int(block_hash))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no KV cache event: {error!r}") from None

    def clear(self) -> None:
        """Nothing is known any more."""
        self.epoch += 1
        self._links.clear()
        self._slots.clear()

    # `PrefixCache`

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        return self._slots.match(hashes)

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return self._slots.identities(blocks)

    def drain_events(self) -> CacheEvents:
        return self._slots.drain()

    def on_change(self, hook: Callable[[], None]) -> None:
        self._slots.hook = hook

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int | None]:
        return [None] * len(blocks)

    def pin(self, blocks: Sequence[int]) -> None:
        """Its blocks are the engine's to keep."""

    def unpin(self, blocks: Sequence[int]) -> None:
        """As above."""

    def evict(self, n: int) -> list[int]:
        return []

    # inside

    def _must_be_next(self, rank: int, number: int) -> None:
        expected = self._next_event.get(rank)
        self._next_event[rank] = number + 1
        if expected is not None and number != expected:
            self.clear()

    def _stored(self, parent: int | None, blocks: Sequence[dict[str, Any]]) -> None:
        link = self._links.get(parent) if parent is not None else None
        root_level = parent is None
        for block in blocks:
            name = int(block["block_hash"])
            self._remove(name)  # said again, it is still there once
            link = self._links[name] = self._identify(block, link, root_level=root_level)
            if link is not None:
                self._slots.put(link.identity)
            root_level = False

    def _identify(self, block: dict[str, Any], parent: _Link | None, *, root_level: bool) -> _Link | None:
        """Whose block this is; None: nobody's that is known, or of more than one, or it is not full."""
        tokens = block["tokens"]
        plain = len(tokens) == self._block_tokens and not any(token.get("token_extra_id") for token in tokens)
        if not plain or (parent is None and not root_level):
            return None
        packed = pack_ids([int(token["token_id"]) for token in tokens])
        if parent is None:
            links = [link for link in self._chains.beginning_with(packed) if link.identity not in self._slots]
            return links[0] if len(links) == 1 else None
        identity = next(chain(packed, self._block_tokens, parent.root, parent.identity))
        fits = identity in self._chains and identity not in self._slots
        return _Link(parent.root, identity) if fits else None

    def _remove(self, block_hash: int) -> None:
        link = self._links.pop(block_hash, None)
        if link is not None:
            self._slots.drop(link.identity)


class _Chains:
    """Identities of recent requests' blocks, the oldest forgotten first; and which chains begin with which ids."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: OrderedDict[bytes, bytes | None] = OrderedDict()
        """Identity to the packed ids of a chain's first block, None for the others."""
        self._first: dict[bytes, dict[bytes, _Link]] = {}

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._known

    def add(self, root: bytes, ids: Sequence[int]) -> None:
        identities = block_hashes(ids, self._block_tokens, root)
        for identity in reversed(identities[1:]):
            self._note(identity, None)
        if identities:
            packed = pack_ids(ids[: self._block_tokens])
            self._first.setdefault(packed, {})[identities[0]] = _Link(root, identities[0])
            self._note(identities[0], packed)  # last, so that a chain's beginning is forgotten last
        while len(self._known) > RECENT_BLOCKS:
            self._forget(*self._known.popitem(last=False))

    def beginning_with(self, packed: bytes) -> Iterator[_Link]:
        return iter(tuple(self._first.get(packed, {}).values()))

    def _note(self, identity: bytes, packed: bytes | None) -> None:
        self._known[identity] = packed
        self._known.move_to_end(identity)

    def _forget(self, identity: bytes, packed: bytes | None) -> None:
        if packed is not None:
            del self._first[packed][identity]
            if not self._first[packed]:
                del self._first[packed]


class _Slots:
    """What is published: identities under small numbers, so that it can be read page by page, and what changed of it."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._free: list[int] = []
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self.hook: Callable[[], None] = _nothing

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._numbers

    def put(self, identity: bytes) -> None:
        number = self._free.pop() if self._free else len(self._numbers)
        self._numbers[identity], self._names[number] = number, identity
        self._announce()
        self._stored[identity] = None

    def drop(self, identity: bytes) -> None:
        number = self._numbers.pop(identity)
        del self._names[number]
        self._free.append(number)
        self._announce()
        if identity in self._stored:
            del self._stored[identity]
        else:
            self._removed[identity] = None

    def clear(self) -> None:
        for identity in list(self._numbers):
            self.drop(identity)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        found: list[int] = []
        for identity in hashes:
            if identity not in self._numbers:
                break
            found.append(self._numbers[identity])
        return found

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return [self._names[block] for block in blocks if block in self._names]

    def drain(self) -> CacheEvents:
        events = CacheEvents(tuple(self._stored), tuple(key for key in self._removed if key not in self._stored))
        self._stored, self._removed = {}, {}
        return events

    def _announce(self) -> None:
        if not self._stored and not self._removed:
            self.hook()


def _nothing() -> None:
    """Until somebody wants to know."""
