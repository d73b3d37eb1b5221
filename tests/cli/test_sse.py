"""Server-sent events, as far as we read them."""

from __future__ import annotations

import pytest

from services.cli.sse import events


@pytest.mark.parametrize(
    ("lines", "data"),
    [
        (["data: a", "", "data: b", ""], ["a", "b"]),
        (["data:no space", ""], ["no space"]),
        (["data:  two spaces", ""], [" two spaces"]),
        (["data: one", "data: event", ""], ["one\nevent"]),
        ([": a comment", "event: x", "id: 1", "retry: 5", "data: a", ""], ["a"]),
        (["", "", "data: a", "", ""], ["a"]),
        (["data: cut off"], []),
        (["data", ""], []),
        ([], []),
    ],
)
def test_events(lines: list[str], data: list[str]) -> None:
    assert list(events(lines)) == data
