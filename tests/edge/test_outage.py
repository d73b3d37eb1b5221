"""When patience with a queue that cannot be reached ends."""

from __future__ import annotations

from services.edge.jobs.outage import Outage


def test_it_lasts_from_the_first_failure() -> None:
    outage = Outage(10.0)
    assert [outage.failed(now) for now in (100.0, 105.0, 110.0, 110.1, 115.0)] == [False, False, False, True, True]


def test_a_success_ends_it() -> None:
    outage = Outage(10.0)
    assert [outage.failed(now) for now in (100.0, 109.0)] == [False, False]
    outage.worked()
    assert not outage.failed(110.1)


def test_nobody_tried_for_long_so_it_is_another_one() -> None:
    outage = Outage(10.0)
    assert [outage.failed(now) for now in (100.0, 109.0, 119.1, 129.0, 129.2)] == [False, False, False, False, True]
