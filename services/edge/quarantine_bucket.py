"""Bucket `HR_QUARANTINE`: how edges tell one another which requests are refused, and how an operator sees and lifts that.

`nats kv ls HR_QUARANTINE` lists the hashes, `nats kv purge HR_QUARANTINE <hash>` lifts one; any edge's `quarantine` verb does the
same. Owns what has not been written yet. Invariant: JetStream that is down costs the others the news for as long, never this edge
its own memory.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from schemas.errors import BusUnavailable, NotFound, UnreadableMessage
from services.bus.interface import Bus
from services.bus.kv_registry import KvRegistry
from services.clock import Clock
from services.edge.quarantine import TTL_S, Quarantine

_LOOK_S = 1.0
_log = logging.getLogger("headrace.edge")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """`until`: Unix seconds."""

    edge: str
    until: float


class QuarantineBucket:
    """`registry` must give its keys `TTL_S` seconds."""

    def __init__(self, quarantine: Quarantine, registry: KvRegistry, bus: Bus, clock: Clock) -> None:
        self._quarantine = quarantine
        self._registry = registry
        self._bus = bus
        self._clock = clock
        self._unwritten: dict[str, float] = {}
        self._lifted: set[str] | None = None
        """While all are read: what was lifted meanwhile, of which the answer may still tell."""
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        """What is lifted while the bucket is read or written would come back."""
        quarantine.on_added = self._added

    async def open(self) -> None:
        """Hear the others. Raises `Disconnected`."""
        await self._registry.watch(self._changed)

    async def run(self) -> None:
        """Write our own; read all, and again after every loss of the connection. Until cancelled."""
        read_at: float | None = None
        while True:
            now = self._clock.monotonic()
            try:
                async with self._turn:
                    if read_at is None or now - read_at > self._bus.steady_for():
                        await self._registry.ensure()  # a put cannot tell that it is gone: we hear it ourselves
                        await self._read_all()
                        read_at = now
                    await self._write()
            except BusUnavailable as error:
                read_at = None
                _log.debug("the quarantine bucket cannot be reached: %s", error)
            self._wake.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def held(self) -> dict[str, float]:
        """Hashes that are refused, as far as this edge knows, with the seconds left."""
        return self._quarantine.held()

    async def clear(self, which: str) -> list[str]:
        """Lift one hash, or "all", here and at every edge; which were. Raises `NotFound`; `BusUnavailable`: some are left."""
        held = sorted(self.held())
        if which != "all" and which not in held:
            raise NotFound(f"{which[:64]!r} is not refused.")
        keys = held if which == "all" else [which]
        async with self._turn:
            for key in keys:
                await self._registry.remove(key)
                self._unwritten.pop(key, None)
                self._quarantine.lift(key)
        return keys

    def _added(self, key: str) -> None:
        self._unwritten[key] = self._clock.wall() + TTL_S
        self._wake.set()

    async def _write(self) -> None:
        for key, until in list(self._unwritten.items()):
            if until > self._clock.wall():
                await self._registry.put(key, Held(edge=self._bus.process, until=until))
            self._unwritten.pop(key, None)

    async def _read_all(self) -> None:
        self._lifted = lifted = set[str]()
        try:
            found = await self._registry.entries()
        finally:
            self._lifted = None
        for key in found.keys() - lifted:
            try:
                self._changed(key, found[key])
            except UnreadableMessage as error:  # somebody else's: it hides none of ours
                _log.warning("an entry of the quarantine bucket is not heeded: %s", error.message)

    def _changed(self, key: str, value: bytes | None) -> None:
        if value is None:
            if self._lifted is not None:
                self._lifted.add(key)
            self._unwritten.pop(key, None)  # written all the same, when only the answer came too late
            self._quarantine.lift(key)
            return
        try:
            held = msgspec.json.decode(value, type=Held)
        except msgspec.DecodeError as error:
            raise UnreadableMessage(f"quarantine {key}: {error}") from None
        self._quarantine.hold(key, held.until - self._clock.wall())
