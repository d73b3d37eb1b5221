"""What a worker says to edges: the records of one engine step that share a reply subject travel in one message.

Owns the records not yet sent and the replay ring. Invariant: within a run, records leave in the order they were put, and each
message's NATS reply subject is this worker's control subject.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from schemas.control import Position
from schemas.errors import BusError, Disconnected
from schemas.reply import Event, Frame, Frames
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock
from services.telemetry.logs import AtMost
from services.worker.parcels import parcels
from services.worker.replay import RECORDS, ReplayRing

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    frames: list[Frame] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


_SPARE = 128
"""Room in a run's ring for what it says between our reconnect and the edge's replay."""


class Outbox:
    def __init__(self, bus: Bus, control: str, ring: ReplayRing, clock: Clock) -> None:
        self._bus = bus
        self._control = control
        self._ring = ring
        self._pending: dict[str, _Batch] = {}
        self._unsent: Counter[int] = Counter()
        """Frames of each run since the connection was lost: they are in its ring and nowhere else."""
        self._may_log = AtMost(clock.monotonic)

    @property
    def full(self) -> bool:
        """A run's ring has no room for more that nobody heard: one frame more may push out what its edge has not."""
        return any(frames >= RECORDS - _SPARE for frames in self._unsent.values())

    def frame(self, reply_to: str, frame: Frame) -> None:
        """Put, not sent before `flush`."""
        self._ring.frame(reply_to, frame)
        self._batch(reply_to).frames.append(frame)

    def event(self, reply_to: str, event: Event) -> None:
        """Put, not sent before `flush`. Frames of the run that were put before it come before it."""
        self._ring.event(reply_to, event)
        self._batch(reply_to).events.append(event)
        if event.state.terminal:
            self._unsent.pop(event.run, None)

    def replay(self, run: int, positions: tuple[Position, ...] = (), reply_to: str = "") -> None:
        """Send again what the ring has of a run; without positions its last event only. To whom its records go, or elsewhere."""
        replay = self._ring.replay(run, positions)
        if replay is not None:
            self._send(reply_to or replay.reply_to, _Batch(replay.frames, replay.events))

    def flush(self) -> None:
        """Send what was put. While the bus is down it is lost here and healed by a replay."""
        pending, self._pending = self._pending, {}
        for reply_to, batch in pending.items():
            self._send(reply_to, batch)

    def _batch(self, reply_to: str) -> _Batch:
        batch = self._pending.get(reply_to)
        if batch is None:
            batch = self._pending[reply_to] = _Batch()
        return batch

    def _send(self, reply_to: str, batch: _Batch) -> None:
        *most, last = parcels(batch.frames)
        for frames in most:
            self._publish(reply_to, Frames(process=self._bus.process, frames=frames))
        self._publish(reply_to, Frames(process=self._bus.process, frames=last, events=tuple(batch.events)))

    def _publish(self, reply_to: str, message: Frames) -> None:
        try:
            send(self._bus, reply_to, message, reply=self._control)
            self._unsent.clear()
        except BusError as error:
            if isinstance(error, Disconnected):
                self._unsent.update(frame.run for frame in message.frames)
            if self._may_log() is not None:  # one line a second, not one a step
                _log.warning("records for %s stay in the replay ring: %s", reply_to, error)
