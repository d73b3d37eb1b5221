"""How `headrace up` starts its NATS server."""

from __future__ import annotations

import pytest

from services.cli.up.nats import environment


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (4, "1"), (8, "2"), (64, "16")])
def test_it_takes_a_quarter_of_the_cores_and_one_at_least(cores: int, threads: str) -> None:
    assert environment({"HOME": "/home/me"}, cores) == {"HOME": "/home/me", "GOMAXPROCS": threads}


def test_a_number_that_somebody_set_stands() -> None:
    assert environment({"GOMAXPROCS": "3"}, 64) == {"GOMAXPROCS": "3"}
