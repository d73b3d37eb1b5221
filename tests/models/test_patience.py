"""Trouble is put up with for a while and told; what will not change is not asked for again. In virtual time."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from random import Random
from typing import Any

import pytest

from services.clock import LoopClock
from services.models.errors import Forbidden, Missing, ModelError, Trouble
from services.models.patience import LONGEST_PAUSE_S, PatientStore
from tests.models.stores import Fault, MemoryStore
from tests.simulation.loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


class Patient:
    """A store of one object whose reads fail as told; when it was asked, and what was said of it."""

    def __init__(self, loop: VirtualLoop, *errors: ModelError, retry_s: float = 60.0, seed: int = 1) -> None:
        self.loop = loop
        self.asked: list[float] = []
        self.warnings: list[str] = []
        self._errors = list(errors)
        inner = MemoryStore()
        inner.objects["a"] = b"content"
        inner.fault = self._fault()
        self.store = PatientStore(inner, retry_s, LoopClock(loop), Random(seed), self.warnings.append)

    def read(self) -> bytes:
        reading: Coroutine[Any, Any, bytes] = self.store.read("a", 0, 7)
        return self.loop.run_until_complete(reading)

    def _fault(self) -> Fault:
        async def fault(path: str, start: int) -> None:
            self.asked.append(self.loop.time())
            if self._errors:
                raise self._errors.pop(0)

        return fault


def test_trouble_that_passes_is_no_news_to_the_caller(loop: VirtualLoop) -> None:
    patient = Patient(loop, *[Trouble("503 SlowDown")] * 3)
    assert patient.read() == b"content"
    assert len(patient.asked) == 4
    assert patient.warnings == ["503 SlowDown; asking again"]


def test_pauses_grow_to_an_end(loop: VirtualLoop) -> None:
    patient = Patient(loop, *[Trouble("503")] * 20, retry_s=1e6)
    patient.read()
    pauses = [later - earlier for earlier, later in zip(patient.asked, patient.asked[1:], strict=False)]
    assert pauses[0] <= 0.25
    assert max(pauses) <= LONGEST_PAUSE_S
    assert min(pauses[-5:]) >= LONGEST_PAUSE_S / 2


def test_two_machines_do_not_ask_at_the_same_times(loop: VirtualLoop) -> None:
    one, other = (Patient(loop, *[Trouble("503")] * 5, seed=seed) for seed in (1, 2))
    one.read()
    began = loop.time()
    other.read()
    assert one.asked[1:] != [time - began for time in other.asked[1:]]


def test_trouble_that_lasts_ends_with_its_reason(loop: VirtualLoop) -> None:
    patient = Patient(loop, *[Trouble("503 SlowDown")] * 1000, retry_s=60.0)
    with pytest.raises(Trouble, match=r"503 SlowDown; asked again for \d+ s"):
        patient.read()
    assert 60.0 <= loop.time() <= 60.0 + LONGEST_PAUSE_S
    assert len(patient.warnings) > 3, "who waits for a minute is told more than once"


@pytest.mark.parametrize("error", [Missing("gone"), Forbidden("no"), ModelError("400 Bad Request")])
def test_what_will_not_change_is_asked_for_once(loop: VirtualLoop, error: ModelError) -> None:
    patient = Patient(loop, error)
    with pytest.raises(type(error)):
        patient.read()
    assert len(patient.asked) == 1
