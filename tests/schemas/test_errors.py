"""What every refusal says of itself, whoever raised it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from schemas.errors import HeadraceError, RateLimited, Unavailable


def tree(kind: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from tree(below)


@pytest.mark.parametrize("kind", list(tree(HeadraceError)), ids=lambda kind: kind.__name__)
def test_who_is_to_come_again_is_told_when(kind: type[HeadraceError]) -> None:
    """A worker's engine, or a peer of another build, may give no time with its refusal."""
    assert (kind("no").wait is not None) == (kind.status in (429, 503))


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1), (-1.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (86400.0, 86400)])
def test_in_whole_seconds(seconds: float, told: int) -> None:
    assert RateLimited("no", retry_after=seconds).wait == Unavailable("no", retry_after=seconds).wait == told
