"""What this router sees of the workers: newest state, newest credits, and what it placed since. An estimate, rebuilt from beats.

Owns no timer and no subscription: messages are fed in, `live` is read. Must not know where work should go. Invariants: of two
credits the higher version stands; what this router placed is off the estimate from the moment it asks until the worker's own
numbers contain it; a process once gone stays gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from schemas.identity import replaces
from schemas.state import Cause, Credits, WorkerState
from services.bus.silence import QUIET_S
from services.clock import Clock
from services.router.placement import Worker

SILENT_S = 3.0
"""A worker not heard for this long is not used. Stands still while our own bus is down and this long after."""
RESTART_S = 30.0
"""How long a model that lost all its workers is waited for."""
FORGET_S = 60.0
"""How long the silent and the gone are remembered."""


class Line(Protocol):
    """The part of the bus that says whether silence means anything."""

    def steady_for(self) -> float: ...


@dataclass(slots=True, eq=False)
class Charge:
    """Work asked of one worker. `version`: the first credits that contain it; None while nobody answered."""

    process: str
    prefill_tokens: int = 0
    slots: int = 0
    blocks: int = 0
    version: int | None = None

    def open_at(self, version: int) -> bool:
        """True when credits of `version` do not contain this charge yet."""
        return self.version is None or version < self.version


@dataclass(slots=True)
class _Entry:
    state: WorkerState
    credits: Credits
    heard: float
    away: bool = False
    """The server saw its connection end, and it was not heard since."""
    charges: list[Charge] = field(default_factory=list)


class View:
    """The workers of every model."""

    def __init__(self, clock: Clock, line: Line) -> None:
        self._clock = clock
        self._line = line
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, float] = {}
        self._served: dict[str, float] = {}

    # what is heard

    def observe(self, state: WorkerState) -> list[str]:
        """A beat. Returns the processes that it proves dead: older starts of the same name that never said goodbye."""
        name = state.process
        if name in self._gone or any(replaces(known, name) for known in self._entries):
            return []
        replaced = [known for known in self._entries if replaces(name, known)]
        for known in replaced:
            self.remove(known)
        entry = self._entries.setdefault(name, _Entry(state, state.credits, 0.0))
        entry.state, entry.heard, entry.away = state, self._clock.monotonic(), False
        self._served[state.model] = entry.heard
        self.learn(name, state.credits)
        entry.charges = [charge for charge in entry.charges if charge.open_at(state.credits.version)]
        return replaced

    def learn(self, process: str, credits: Credits) -> None:
        """Credits that came with a beat or an answer."""
        entry = self._entries.get(process)
        if entry is not None and credits.version >= entry.credits.version:
            entry.credits = credits

    def died(self, process: str, cause: Cause) -> None:
        """`hr.dead` said so. A process that is only disconnected may come back: a beat of it says so."""
        entry = self._entries.get(process)
        if cause is not Cause.DISCONNECTED:
            self.remove(process)
        elif entry is not None and self._clock.monotonic() - entry.heard > QUIET_S:
            entry.away = True

    def remove(self, process: str) -> None:
        """Not used again, whatever is still on its way from it."""
        self._entries.pop(process, None)
        self._gone[process] = self._clock.monotonic()

    def forget_old(self) -> None:
        """Bounds memory; call it now and then."""
        oldest = self._clock.monotonic() - FORGET_S
        self._gone = {process: at for process, at in self._gone.items() if at > oldest}
        if self._line.steady_for() > FORGET_S:
            self._entries = {process: entry for process, entry in self._entries.items() if entry.heard > oldest}

    # what this router does

    def charge(self, process: str, *, prefill_tokens: int = 0, slots: int = 0, blocks: int = 0) -> Charge:
        """Take work off a worker's estimate, before it is asked. Settle, lose or undo the charge afterwards."""
        charge = Charge(process, prefill_tokens, slots, blocks)
        if process in self._entries:
            self._entries[process].charges.append(charge)
        return charge

    def settle(self, charge: Charge, credits: Credits) -> None:
        """The worker answered, yes or no: its `credits` contain the charge."""
        charge.version = credits.version
        self.learn(charge.process, credits)

    def lose(self, charge: Charge) -> None:
        """Nobody answered. The worker may have taken it: only newer credits will tell."""
        entry = self._entries.get(charge.process)
        charge.version = entry.credits.version + 1 if entry else 0

    def undo(self, charge: Charge) -> None:
        """The worker was not asked, or never heard it."""
        charge.version = -1

    def give_back(self, process: str, *, slots: int, blocks: int) -> None:
        """The worker was told to release what its credits hold for us; it counts as free until newer credits come."""
        self.lose(self.charge(process, slots=-slots, blocks=-blocks))

    # what is seen

    def __contains__(self, process: str) -> bool:
        return process in self._entries

    def models(self) -> set[str]:
        """Models with a live worker."""
        return {entry.state.model for entry in self._live()}

    def served_lately(self, model: str) -> bool:
        """Whether a worker of `model` was heard so lately that another start of it may be on its way."""
        return self._clock.monotonic() - self._served.get(model, float("-inf")) < RESTART_S

    def states(self, model: str) -> list[WorkerState]:
        return [entry.state for entry in self._live() if entry.state.model == model]

    def workers(self, model: str) -> list[Worker]:
        """The live workers of `model`, as placement wants them."""
        return [_estimate(entry) for entry in self._live() if entry.state.model == model]

    def _live(self) -> Iterator[_Entry]:
        # Silence means something only after the bus was steady for as long: everybody had the time to beat.
        oldest = self._clock.monotonic() - SILENT_S if self._line.steady_for() >= SILENT_S else float("-inf")
        return (entry for entry in self._entries.values() if entry.heard > oldest)


def _estimate(entry: _Entry) -> Worker:
    state, credits = entry.state, entry.credits
    open_charges = [charge for charge in entry.charges if charge.open_at(credits.version)]
    unseen = [charge for charge in entry.charges if charge.prefill_tokens and charge.open_at(state.credits.version)]
    return Worker(
        process=state.process,
        role=state.role,
        kv_compat=state.kv_compat,
        weights=state.weights,
        context_length=state.context_length,
        block_tokens=state.block_tokens,
        kv_total=state.kv_total,
        queued=state.queued + len(unseen),
        running=state.running,
        prefill_tokens=credits.prefill_tokens - sum(charge.prefill_tokens for charge in open_charges),
        decode_slots=credits.decode_slots - sum(charge.slots for charge in open_charges),
        kv_blocks=credits.kv_blocks - sum(charge.blocks for charge in open_charges),
        draining=state.draining,
        degraded=entry.away or state.stalled,
    )
