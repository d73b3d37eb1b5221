"""The runs of one worker: those it computes, and for a while those that ended, were handed on, or were cancelled too early.

Owns the state of each run here. Knows no bus and no engine. Invariant: a run's state only goes forward (`schemas.lifecycle`),
and a cancel that came before its run is not forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from schemas.job import Job
from schemas.lifecycle import State, advance
from schemas.reply import DigestEntry
from services.clock import Clock
from services.engine.protocol import RunTotals, TokenOutput

REMEMBER_S = 60.0
FORWARD_S = 10.0
UNATTENDED_S = 30.0
"""How long a detached job, or what is left of it here, waits for an edge that holds it."""


@dataclass(slots=True, eq=False)
class Run:
    """One run here. `hop` 1 prefill, 2 decode. `stop` drops it at the stage it is in; its end is reported afterwards.

    `deadline` is monotonic seconds. `partner` is the process that holds the reservation (for prefill) or the blocks (for
    decode). `last` maps a choice to its last token; `stopped`: choices that the edge wants no more; `going`: those that still
    compute or will; `totals` are prefill's, once it is done. `ending` is what a run that is being dropped ends as.
    `unattended_s`: how long no edge has said that it holds this detached job. `to_come`: tokens that the engine does not know of
    yet. `end`: what digests say of it once it has ended.
    """

    id: int
    job: Job
    hop: int
    state: State
    deadline: float
    stop: Callable[[], object]
    partner: str = ""
    last: dict[int, TokenOutput] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    totals: RunTotals = field(default_factory=RunTotals)
    ending: tuple[State, str] = (State.CANCELLED, "")
    stopping: bool = False
    unattended_s: float = 0.0
    to_come: int = 0
    end: DigestEntry | None = None
    going: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.going = {choice.index for choice in self.job.open_choices}

    def note(self, output: TokenOutput) -> None:
        """The last token of a choice so far."""
        self.last[output.choice] = output
        if output.finish is not None:
            self.going.discard(output.choice)

    def want_no_more(self, choices: Collection[int]) -> None:
        """The edge has enough of these."""
        self.stopped.update(choices)
        self.going.difference_update(choices)

    def advance(self, state: State) -> None:
        """Raises `IllegalTransition`."""
        self.state = advance(self.state, state)


@dataclass(frozen=True, slots=True)
class _Past:
    """Something remembered of a run that is no longer here: since when, the run itself, where it went."""

    since: float
    run: Run | None = None
    process: str = ""


class RunTable:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: dict[int, Run] = {}
        self._past: dict[int, _Past] = {}
        self._cancelled: dict[int, _Past] = {}
        self._detached: dict[int, Run] = {}
        """Those of the others that are of detached jobs."""

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._active.values()))

    def get(self, run: int) -> Run | None:
        return self._active.get(run)

    def admit(self, run: Run) -> None:
        """Raises ValueError for a run that is or was here."""
        if self.known(run.id):
            raise ValueError(f"run {run.id} is not new")
        self._active[run.id] = run
        if run.job.detached:
            self._detached[run.id] = run

    def known(self, run: int) -> bool:
        """It is here, or was here less than a minute ago."""
        return run in self._active or run in self._past

    def end(self, run: Run, *, handed_to: str = "") -> None:
        """The run is over here; `handed_to` names the process that goes on with it."""
        del self._active[run.id]
        self._past[run.id] = _Past(self._clock.monotonic(), run, handed_to)

    def forward_to(self, run: int) -> str:
        """The process that a run was handed to less than 10 s ago, "" when there is none."""
        past = self._past.get(run)
        return past.process if past is not None and past.since > self._clock.monotonic() - FORWARD_S else ""

    def ended_within(self, seconds: float) -> list[Run]:
        """Runs that ended here, not those that were handed on; in order of time."""
        oldest = self._clock.monotonic() - seconds
        recent = takewhile(lambda past: past.since > oldest, reversed(self._past.values()))
        return [past.run for past in recent if past.run and not past.process][::-1]

    def detached(self, ended_s: float) -> list[Run]:
        """Of detached jobs: those that are here, and those that ended here in the last `ended_s` seconds."""
        oldest = self._clock.monotonic() - ended_s
        found = []
        for run in self._detached.values():
            past = self._past.get(run.id)
            if past is None or (not past.process and past.since > oldest):
                found.append(run)
        return found

    def of_job(self, job: str, ended_s: float) -> Run | None:
        """The run of this job that is furthest on, among those here and those that ended here in the last `ended_s` seconds."""
        runs = [run for run in (*self, *self.ended_within(ended_s)) if run.job.job == job]
        return max(runs, key=lambda run: (run.job.attempt, run.hop), default=None)

    def cancel_early(self, run: int) -> None:
        """A cancel of a run that is not here (yet)."""
        self._cancelled[run] = _Past(self._clock.monotonic())

    def cancelled_early(self, run: int) -> bool:
        return run in self._cancelled

    def sweep(self) -> None:
        """Forget what is a minute old. Entries were added in order of time."""
        oldest = self._clock.monotonic() - REMEMBER_S
        for table in (self._past, self._cancelled):
            while table and table[first := next(iter(table))].since <= oldest:
                del table[first]
                self._detached.pop(first, None)
