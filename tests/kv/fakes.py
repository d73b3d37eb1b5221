"""A small prefix cache that keeps everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from services.kv.prefix import CacheEvents


class FakePrefixCache:
    """Takes everything; evicts what was unpinned first. `evict_wrongly` makes it break its promise."""

    def __init__(self) -> None:
        self.index: dict[bytes, int] = {}
        self.idle: dict[int, None] = {}
        self.evict_wrongly = False
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        found = []
        for key in hashes:
            if key not in self.index:
                break
            found.append(self.index[key])
        return found

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> list[int | None]:
        for key, block in zip(hashes, blocks, strict=True):
            if key not in self.index:
                self.index[key] = block
                self._stored.append(key)
        return [self.index[key] for key in hashes]

    def pin(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self.idle[block]

    def unpin(self, blocks: Sequence[int]) -> None:
        assert set(blocks) <= set(self.index.values()), "only what is indexed can be cached"
        self.idle.update(dict.fromkeys(blocks))

    def evict(self, n: int) -> list[int]:
        victims = list(self.idle)[: 0 if self.evict_wrongly else n]
        for block in victims:
            del self.idle[block]
        removed = [key for key, block in self.index.items() if block in victims]
        for key in removed:
            del self.index[key]
        self._removed += removed
        return victims

    def drain_events(self) -> CacheEvents:
        events = CacheEvents(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = [], []
        return events

    def identities(self, blocks: Iterable[int]) -> list[bytes]:
        known = {block: key for key, block in self.index.items()}
        return [known[block] for block in blocks if block in known]

    def on_change(self, hook: Callable[[], None]) -> None:
        raise NotImplementedError
