"""Days and months of UTC."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from services.edge.gate.windows import DAY, MONTH, RUNNING, name, resets_in


@pytest.mark.parametrize(
    ("moment", "day", "month", "to_midnight", "to_month"),
    [
        ("2026-11-29T21:00:00", "day-2026-11-29", "month-2026-11", 3 * 3600, 27 * 3600),
        ("2024-02-29T23:59:59", "day-2024-02-29", "month-2024-02", 1, 1),
        ("2026-12-31T00:00:00", "day-2026-12-31", "month-2026-12", 86_400, 86_400),
        ("2027-01-01T00:00:00", "day-2027-01-01", "month-2027-01", 86_400, 31 * 86_400),
    ],
)
def test_windows(moment: str, day: str, month: str, to_midnight: float, to_month: float) -> None:
    now = datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()
    assert (name(DAY, now), name(MONTH, now), name(RUNNING, now)) == (day, month, "running")
    assert (resets_in(DAY, now), resets_in(MONTH, now)) == (to_midnight, to_month)
