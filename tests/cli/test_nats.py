"""How `headrace up` starts its NATS server."""

from __future__ import annotations

import pytest

from services.cli.up import nats


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (4, "1"), (8, "2"), (64, "16")])
def test_it_takes_a_quarter_of_the_cores_and_one_at_least(cores: int, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that a container leaves to it, as Go itself counts them, not of its host's."""
    monkeypatch.setattr(nats, "available_cores", lambda: tuple(range(cores)))
    assert nats.environment({"HOME": "/home/me"}) == {"HOME": "/home/me", "GOMAXPROCS": threads}


def test_a_number_that_somebody_set_stands() -> None:
    assert nats.environment({"GOMAXPROCS": "3"}) == {"GOMAXPROCS": "3"}
