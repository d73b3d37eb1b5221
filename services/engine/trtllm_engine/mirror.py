"""TensorRT-LLM's reusable blocks, under our identities: its KV cache events matched with the chains of recent requests.

An event has token ids and the engine's own hashes, but no tenant. So a block is known only as a link of a chain that a recent
request of ours is known to have; what fits several tenants' chains is ambiguous, and is not published, nor is what follows it.
Invariant: what is published was stored by the engine and not removed, as far as no event was missed; a gap in their numbers
clears everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from schemas.job import pack_ids
from services.engine.trtllm_engine.chains import Chains, Link
from services.engine.trtllm_engine.published import Published
from services.kv.hashing import chain
from services.kv.prefix import CacheEvents


class Mirror:
    """A `PrefixCache` that only shows. Its blocks are numbers for paging, no memory. `epoch` counts how often it was cleared.

    `most`: the numbers there are. An engine that keeps blocks in the host's memory too has more; those are not published.
    """

    most = sys.maxsize

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chains = Chains(block_tokens)
        self._links: dict[int, Link | None] = {}
        """By the engine's hash; None = there, but not published."""
        self._published = Published()
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
        self._published.clear()

    # `PrefixCache`

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        return self._published.match(hashes)

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        return self._published.identities(blocks)

    def drain_events(self) -> CacheEvents:
        return self._published.changes.drain()

    def on_change(self, hook: Callable[[], None]) -> None:
        self._published.changes.hook = hook

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
                self._published.put(link.identity)
            root_level = False

    def _identify(self, block: dict[str, Any], parent: Link | None, *, root_level: bool) -> Link | None:
        """Whose block this is; None: nobody's that is known, or of more than one, it is not full, or no number is left."""
        tokens = block["tokens"]
        if len(self._published) >= self.most:
            return None
        plain = len(tokens) == self._block_tokens and not any(token.get("token_extra_id") for token in tokens)
        if not plain or (parent is None and not root_level):
            return None
        packed = pack_ids([int(token["token_id"]) for token in tokens])
        if parent is None:
            links = [link for link in self._chains.beginning_with(packed) if link.identity not in self._published]
            return links[0] if len(links) == 1 else None
        identity = next(chain(packed, self._block_tokens, parent.root, parent.identity))
        fits = identity in self._chains and identity not in self._published
        return Link(parent.root, identity) if fits else None

    def _remove(self, block_hash: int) -> None:
        link = self._links.pop(block_hash, None)
        if link is not None:
            self._published.drop(link.identity)
