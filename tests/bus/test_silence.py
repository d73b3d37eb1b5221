"""One peer that falls silent is dead; several at once are the bus."""

from __future__ import annotations

import pytest

from services.bus.silence import BUS_S, SILENT_S, patience

NOW = 100.0
FRESH = NOW - 0.2


@pytest.mark.parametrize(
    ("last", "others", "expected"),
    [
        (NOW - 4.0, [], SILENT_S),
        (NOW - 4.0, [FRESH, FRESH], SILENT_S),
        (NOW - 4.0, [NOW - 4.5], BUS_S),
        (NOW - 4.0, [NOW - 3.2], BUS_S),
        (NOW - 4.0, [NOW - 5.5, FRESH], SILENT_S),  # not within a second of one another
        (NOW - 4.0, [NOW - 4.0, FRESH, FRESH, FRESH, FRESH], BUS_S),  # a third of six
        (NOW - 4.0, [NOW - 4.0, FRESH, FRESH, FRESH, FRESH, FRESH], SILENT_S),  # less than a third of seven
        (NOW - 4.0, [NOW - 60.0, NOW - 61.0], SILENT_S),  # who is silent for a minute is none of those we hear
    ],
)
def test_patience(last: float, others: list[float], expected: float) -> None:
    assert patience(last, [last, *others], NOW) == expected


def test_who_just_spoke_has_not_fallen_silent() -> None:
    """Two that were heard together lately are not two that fell silent together."""
    assert patience(NOW - 0.1, [NOW - 0.1, NOW - 0.2], NOW) == SILENT_S
