"""What was loaded is not visited by later collections; what is made afterwards is, cycles included."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from services.telemetry.collector import YOUNG, keep_collections_short


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_what_is_there_is_visited_no_more_and_later_garbage_is_collected() -> None:
    loaded, garbage = Node(), weakref.ref(Node())
    assert any(found is loaded for found in gc.get_objects())
    keep_collections_short()
    assert garbage() is None, "what start-up left behind is freed first"
    assert not any(found is loaded for found in gc.get_objects())
    assert gc.get_threshold()[0] == YOUNG
    later = weakref.ref(Node())
    gc.collect()
    assert later() is None
