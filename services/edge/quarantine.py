"""Requests that killed the processes which owned them, one after another: refused by content for ten minutes.

Owns the keyed hashes, in memory. Knows neither NATS nor other edges (`quarantine_bucket`), and keeps no prompt: a hash says
nothing to who has not the server's secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from services.clock import Clock
from services.edge.jobs.draft import Draft

TTL_S = 600.0


class Quarantine:
    """`draft in quarantine`. `on_added` is called with each hash that was added here."""

    def __init__(self, clock: Clock, secret: bytes = b"") -> None:
        self._clock = clock
        self._secret = secret
        self._until: dict[str, float] = {}
        self.on_added: Callable[[str], None] | None = None

    def key(self, draft: Draft) -> str:
        """The same prompt of the same tenant to the same model; how it is sampled does not matter."""
        digest = hashlib.blake2b(key=self._secret, digest_size=16, person=b"hr-quarantine")
        for part in (draft.model.encode(), draft.salt, draft.prompt):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def add(self, draft: Draft) -> None:
        """Refuse it from now on, here and (by who listens) elsewhere."""
        key = self.key(draft)
        self.hold(key, TTL_S)
        if self.on_added is not None:
            self.on_added(key)

    def hold(self, key: str, seconds: float) -> None:
        """Another edge said so."""
        now = self._clock.monotonic()
        self._until = {known: until for known, until in self._until.items() if until > now}
        self._until[key] = now + min(seconds, TTL_S)

    def lift(self, key: str) -> None:
        """An operator said so."""
        self._until.pop(key, None)

    def held(self) -> dict[str, float]:
        """Hashes that are refused, with the seconds left."""
        now = self._clock.monotonic()
        return {key: until - now for key, until in self._until.items() if until > now}

    def __contains__(self, draft: Draft) -> bool:
        return bool(self._until) and self._until.get(self.key(draft), 0.0) > self._clock.monotonic()
