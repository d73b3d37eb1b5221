"""The runs that compute in an engine, each with the sequences it consists of now, and those that ended since the last report.

Owns the end of sequences and runs: their blocks are released here and nowhere else. Must not know steps. Invariant: a run that is
here has at least one sequence; it ends once, with its last one. The caller sees to it that no step in progress touches what ends.
"""

from __future__ import annotations

from schemas.errors import InvalidRequest
from schemas.lifecycle import State
from services.engine.protocol import RunEnd
from services.engine.sequence import Sequence
from services.kv.pool import BlockPool


class LiveRuns:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._runs: dict[int, list[Sequence]] = {}
        self._ended: list[RunEnd] = []

    def __contains__(self, run: int) -> bool:
        return run in self._runs

    def put(self, sequences: list[Sequence]) -> None:
        """A run's sequences from now on; it may be new."""
        self._runs[sequences[0].run] = sequences

    def of(self, run: int) -> list[Sequence]:
        return list(self._runs.get(run, ()))

    def runs(self) -> list[list[Sequence]]:
        """The sequences of each run, in order of arrival."""
        return [list(of_run) for of_run in self._runs.values()]

    def sequences(self) -> list[Sequence]:
        """All, in order of arrival."""
        return [sequence for of_run in self._runs.values() for sequence in of_run]

    def computes(self, sequence: Sequence) -> bool:
        return sequence in self._runs.get(sequence.run, ())

    def leave(self, sequence: Sequence, state: State) -> None:
        """One sequence is over; its run ends, as `state`, if it was the last."""
        if self._runs[sequence.run] == [sequence]:
            self.end(sequence.run, state)
        else:
            self._runs[sequence.run].remove(sequence)
            self._pool.release(sequence.holder)

    def end(self, run: int, state: State, reason: str = "", code: str = "") -> None:
        """The run is over, with all its sequences."""
        for sequence in self._runs.pop(run):
            self._pool.release(sequence.holder)
        self._ended.append(RunEnd(run, state, reason, code))

    def end_refused(self) -> None:
        """Runs whose grammar turned out to be refused."""
        for sequence in [sequence for sequence in self.sequences() if sequence.grammar is not None]:
            if (refusal := sequence.refusal) and self.computes(sequence):
                self.end(sequence.run, State.FAILED, refusal, InvalidRequest.code)

    def hand_over(self, run: int) -> None:
        """The run goes on elsewhere; its blocks stay with its holder."""
        del self._runs[run]

    def clear(self) -> None:
        """Everything ends, and nobody hears of it."""
        for run in list(self._runs):
            self.end(run, State.CANCELLED)
        self._ended.clear()

    def take_ended(self) -> tuple[RunEnd, ...]:
        """What ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended
