"""What this router sees of the workers: newest state, newest credits, and what it placed since. An estimate, rebuilt from beats.

Owns no timer and no subscription: messages are fed in, `pools` is read. Must not know where work should go. Invariants: of two
credits the higher version stands; what this router placed is off the estimate from the moment it asks until the worker's own
numbers contain it; a process once gone stays gone.

Pools are kept, not made: what is heard or charged changes one worker of one pool, so a decision costs no walk over all of them.
"""

from __future__ import annotations

from collections.abc import Collection

from schemas.identity import replaces
from schemas.state import Cause, Credits, WorkerState
from services.bus.silence import QUIET_S, SILENT_S, Line
from services.clock import Clock
from services.router.breaker import SLOW_S
from services.router.estimate import Charge, Known, estimate
from services.router.placement_workers import Pool, Worker

RESTART_S = 30.0
"""How long a model that lost all its workers is waited for."""
FORGET_S = 60.0
"""How long the silent and the gone are remembered."""


class View:
    """The workers of every model."""

    def __init__(self, clock: Clock, line: Line) -> None:
        self._clock = clock
        self._line = line
        self._entries: dict[str, Known] = {}
        self._gone: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._pools: dict[str, dict[str, Pool]] = {}
        self._reopen = float("inf")  # when the first open circuit will be half open
        self._silence = float("inf")  # when the first live worker will have been silent for too long

    # what is heard

    def observe(self, state: WorkerState) -> list[str]:
        """A beat. Returns the processes that it proves dead: older starts of the same name that never said goodbye."""
        name, now, replaced = state.process, self._clock.monotonic(), list[str]()
        if name not in self._entries:
            if name in self._gone or any(replaces(known, name) for known in self._entries):
                return []
            replaced = [known for known in self._entries if replaces(name, known)]
            for known in replaced:
                self.remove(known)
            self._entries[name] = Known(state, state.credits, now)
        entry = self._entries[name]
        entry.state, entry.heard, entry.away = state, now, False
        entry.charges = [charge for charge in entry.charges if charge.open_at(state.credits.version)]
        self._served[state.model] = now
        self._silence = min(self._silence, now + SILENT_S)
        self.learn(name, state.credits)
        return replaced

    def learn(self, process: str, credits: Credits) -> None:
        """Credits that came with a beat or an answer."""
        entry = self._entries.get(process)
        if entry is not None and credits.version >= entry.credits.version:
            entry.credits = credits
        self._refresh(process)

    def died(self, process: str, cause: Cause) -> None:
        """`hr.dead` said so. A process that is only disconnected may come back: a beat of it says so."""
        entry = self._entries.get(process)
        if cause is not Cause.DISCONNECTED:
            self.remove(process)
        elif entry is not None and self._clock.monotonic() - entry.heard > QUIET_S:
            entry.away = True
            self._refresh(process)

    def eject(self, process: str, ejected: bool) -> bool:
        """Take it out, or back: it gets nothing new, last of its pool or not. False: nobody of that name is known."""
        entry = self._entries.get(process)
        if entry is not None:
            entry.ejected = ejected
            self._refresh(process)
        return entry is not None

    def remove(self, process: str) -> None:
        """Not used again, whatever is still on its way from it."""
        entry = self._entries.pop(process, None)
        if entry is not None:
            self._take_out(entry)
        self._gone[process] = self._clock.monotonic()

    def forget_old(self) -> None:
        """Bounds memory; call it now and then."""
        oldest = self._clock.monotonic() - FORGET_S
        self._gone = {process: at for process, at in self._gone.items() if at > oldest}
        if self._line.steady_for() > FORGET_S:
            self._drop_silent()
            self._entries = {process: entry for process, entry in self._entries.items() if entry.heard > oldest}

    # what this router does

    def charge(self, process: str, *, prefill_tokens: int = 0, slots: int = 0, blocks: int = 0) -> Charge:
        """Take work off a worker's estimate, before it is asked. Settle, lose or undo the charge afterwards."""
        charge = Charge(process, self._clock.monotonic(), prefill_tokens, slots, blocks)
        if process in self._entries:
            self._entries[process].charges.append(charge)
            self._refresh(process)
        return charge

    def settle(self, charge: Charge, credits: Credits, *, ok: bool = True) -> None:
        """The worker answered, yes or no: its `credits` contain the charge. `ok`: it was not an error of its own."""
        charge.version = credits.version
        self._judge(charge, ok and self._clock.monotonic() - charge.at <= SLOW_S)
        self.learn(charge.process, credits)

    def lose(self, charge: Charge) -> None:
        """Nobody answered. The worker may have taken it: only newer credits will tell."""
        self._judge(charge, ok=False)
        self._await_credits(charge)

    def undo(self, charge: Charge, *, ok: bool = True) -> None:
        """The worker was not asked, or never heard it; `ok`: that was not its fault."""
        charge.version = -1
        if not ok:
            self._judge(charge, ok)
        self._refresh(charge.process)

    def give_back(self, process: str, *, slots: int, blocks: int) -> None:
        """The worker was told to release what its credits hold for us; it counts as free until newer credits come."""
        self._await_credits(self.charge(process, slots=-slots, blocks=-blocks))

    # what is seen

    def __contains__(self, process: str) -> bool:
        return process in self._entries

    def now(self) -> float:
        """The time that `Worker.free_at` is in."""
        return self._clock.monotonic()

    def models(self) -> set[str]:
        """Models with a live worker."""
        self._drop_silent()
        return set(self._pools)

    def served_lately(self, model: str) -> bool:
        """Whether a worker of `model` was heard so lately that another start of it may be on its way."""
        return self._clock.monotonic() - self._served.get(model, float("-inf")) < RESTART_S

    def states(self, model: str) -> list[WorkerState]:
        return [self._entries[worker.process].state for worker in self.workers(model)]

    def pools(self, model: str) -> Collection[Pool]:
        """The live workers of `model`, as placement wants them."""
        self._drop_silent()
        self._let_back()
        return self._pools.get(model, {}).values()

    def workers(self, model: str) -> list[Worker]:
        """The same, one by one."""
        return [worker for pool in self.pools(model) for worker in pool.workers()]

    def _await_credits(self, charge: Charge) -> None:
        """It stands until credits newer than those we know."""
        entry = self._entries.get(charge.process)
        charge.version = entry.credits.version + 1 if entry else 0
        self._refresh(charge.process)

    def _judge(self, charge: Charge, ok: bool) -> None:
        entry = self._entries.get(charge.process)
        if entry is not None and entry.breaker.outcome(ok, self._clock.monotonic()):
            self._reopen = min(self._reopen, entry.breaker.until)

    def _let_back(self) -> None:
        """Those whose circuit is open no longer."""
        now = self._clock.monotonic()
        if now < self._reopen:
            return
        self._reopen = float("inf")
        for process, entry in self._entries.items():
            if entry.breaker.until > now:
                self._reopen = min(self._reopen, entry.breaker.until)
            elif entry.breaker.allowance:
                self._refresh(process)

    def _drop_silent(self) -> None:
        # Silence means something only after the bus was steady for as long: everybody had the time to beat.
        now = self._clock.monotonic()
        if now < self._silence or self._line.steady_for() < SILENT_S:
            return
        for entry in self._entries.values():
            if entry.heard <= now - SILENT_S:
                self._take_out(entry)
        heard = [entry.heard for entry in self._entries.values() if entry.heard > now - SILENT_S]
        self._silence = min(heard, default=float("inf")) + SILENT_S

    def _refresh(self, process: str) -> None:
        entry = self._entries.get(process)
        if entry is None or (entry.heard <= self._clock.monotonic() - SILENT_S and not self._listed(entry)):
            return
        state = entry.state
        pools = self._pools.setdefault(state.model, {})
        pool = pools.get(state.kv_compat)
        if pool is None:
            to_end = state.capabilities.must_hand_off
            pool = pools[state.kv_compat] = Pool(state.kv_compat, state.weights, state.block_tokens, to_end=to_end)
        pool.put(estimate(entry, self._clock.monotonic()))

    def _listed(self, entry: Known) -> bool:
        pool = self._pools.get(entry.state.model, {}).get(entry.state.kv_compat)
        return pool is not None and entry.state.process in pool.of(entry.state.role)

    def _take_out(self, entry: Known) -> None:
        model, kv_compat = entry.state.model, entry.state.kv_compat
        if not self._listed(entry):
            return
        pool = self._pools[model][kv_compat]
        pool.drop(entry.state.process)
        if pool.empty:
            del self._pools[model][kv_compat]
            if not self._pools[model]:
                del self._pools[model]
