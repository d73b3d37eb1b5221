"""The table of runs: what is found in it, and for how long."""

from __future__ import annotations

from msgspec.structs import replace

from schemas.lifecycle import State
from services.clock import ManualClock
from services.worker.runs import REMEMBER_S, UNATTENDED_S, Run, RunTable
from tests.schemas.samples import job


def test_detached_runs_are_found_until_they_are_too_old() -> None:
    clock = ManualClock()
    table = RunTable(clock)
    plain, ended, going, handed = (
        Run(number, replace(job(), detached=number > 1), 2, State.DECODING, 1e9, lambda: None) for number in range(1, 5)
    )
    for run in (plain, ended, going, handed):
        table.admit(run)
    table.end(ended)
    table.end(handed, handed_to="d2-0k3v9x00abcde")
    assert table.detached(UNATTENDED_S) == [ended, going]
    clock.advance(UNATTENDED_S)
    assert table.detached(UNATTENDED_S) == [going]
    clock.advance(REMEMBER_S)
    table.sweep()
    assert table.detached(1000.0) == [going]
