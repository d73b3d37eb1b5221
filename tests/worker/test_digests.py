"""What a worker says of all its runs: each once, those that ended for 10 s, in as many messages as the bus takes."""

from __future__ import annotations

import itertools

from schemas.codec import encode
from schemas.lifecycle import State
from schemas.reply import Digest
from services.clock import ManualClock
from services.engine.protocol import TokenOutput
from services.worker.digests import KEEP_ENDED_S, digests
from services.worker.runs import Run, RunTable
from tests.schemas.samples import job

LIMIT = 2**20
"""What NATS takes by default."""


def _fill(table: RunTable, runs: range) -> None:
    for number in runs:
        run = Run(2**63 + number, job(), 2, State.DECODING, 1e9, lambda: None)
        run.note(TokenOutput(run=run.id, choice=0, index=70_000, token=5))
        table.admit(run)


def _said(table: RunTable) -> list[Digest]:
    return [digest for _, digest in digests("d1-0k3v9x00abcde", table)]


def test_many_runs_are_said_in_several_messages_of_one_digest() -> None:
    table = RunTable(ManualClock())
    _fill(table, range(20_000))
    said = _said(table)
    assert len(said) > 1
    assert max(len(encode(digest)) for digest in said) < LIMIT / 2
    assert [digest.continued for digest in said] == [False, *itertools.repeat(True, len(said) - 1)]
    assert [entry.run for digest in said for entry in digest.runs] == [run.id for run in table]


def test_what_has_ended_is_said_for_a_while_and_what_was_handed_on_is_not() -> None:
    clock = ManualClock()
    table = RunTable(clock)
    _fill(table, range(3))
    first, second, third = table
    table.end(third, handed_to="d2-0k3v9x00abcde")
    for run in (first, second):
        run.advance(State.FINISHED)
        table.end(run)
        clock.advance(KEEP_ENDED_S / 2)
    (digest,) = _said(table)
    assert [(entry.run, entry.state) for entry in digest.runs] == [(second.id, State.FINISHED)]
    assert table.ended_within(60.0) == [first, second]
    clock.advance(KEEP_ENDED_S)
    assert not _said(table)
