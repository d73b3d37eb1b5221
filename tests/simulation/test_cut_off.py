"""Workers whose bus is away compute on into their replay rings, pause when those are full, and go on when it is back."""

from __future__ import annotations

import pytest

from tests.simulation.plan import Engine, Fault
from tests.simulation.simulate import play
from tests.simulation.stories import story

FAST = Engine(blocks=2000, max_batch=8, prefill_token_s=0.0, decode_step_s=0.004, block_s=0.0)
TOKENS = 480
"""The context of the simulated model is 512."""


@pytest.mark.parametrize("seconds", [1.0, 8.0])
def test_nothing_is_lost_and_nobody_begins_again(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """With a ring of 200 records 8 s would push out most of what no edge has heard."""
    monkeypatch.setattr("services.worker.outbox.RECORDS", 200)
    monkeypatch.setattr("services.worker.replay.RECORDS", 200)
    monkeypatch.setattr("services.worker.outbox._SPARE", 100)
    result = play(story(Fault(2.0, "nats_down", lasts=seconds), engine=FAST, tokens=TOKENS))
    assert result.outcomes == {"finished": 4}
    assert set(result.attempts) == {1}
    assert max(result.pauses) < seconds + 0.6
