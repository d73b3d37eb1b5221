"""What an operator is told of a placement, and workers that he takes out."""

from __future__ import annotations

import json

import pytest

from schemas.errors import NotFound, UnreadableMessage
from schemas.placement import Accepted, Queue
from schemas.state import Role
from tests.router.fakes import MODEL, a_job
from tests.router.harness import House


def a_question(**changes: object) -> bytes:
    return json.dumps({"model": MODEL, "tokens": 40} | changes).encode()


async def test_where_it_would_go_and_why(house: House) -> None:
    prefill, decode = await house.workers(Role.PREFILL, Role.DECODE)
    said = house.routers[0].explainer.answer(a_question())
    assert (said.outcome, said.prefill, said.decode) == ("placed", prefill.process, decode.process)
    assert said.why is not None
    assert said.why.uncached == 40
    assert {(one.process, one.does) for one in said.candidates} == {(prefill.process, "prefill"), (decode.process, "decode")}
    assert not prefill.heard, "nothing comes of asking"
    assert not decode.heard, "nothing comes of asking"


async def test_what_is_cached_is_named(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    job = a_job(tokens=40, salt=b"s")
    assert isinstance(await house.submit(job), Accepted)
    said = house.routers[0].explainer.answer(a_question(tokens=list(range(40)), salt=b"s".hex()))
    assert [(one.process, one.cached) for one in said.candidates] == [(both.process, 32)]
    other = house.routers[0].explainer.answer(a_question(tokens=list(range(40)), salt=b"t".hex()))
    assert [one.cached for one in other.candidates] == [0]


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({"tokens": 2000}, "refused", "2000 tokens are more than this model can take."),
        ({"model": "nobody"}, "refused", "The model is not loaded yet."),
    ],
)
async def test_what_can_never_run(house: House, changes: dict[str, object], outcome: str, reason: str) -> None:
    await house.workers(Role.BOTH)
    said = house.routers[0].explainer.answer(a_question(**changes))
    assert (said.outcome, said.reason) == (outcome, reason)


async def test_who_was_passed_over(house: House) -> None:
    await house.workers(Role.BOTH, slots=0)
    said = house.routers[0].explainer.answer(a_question())
    assert (said.outcome, said.reason, said.passed_over) == ("queue", "no_credit", 1)


@pytest.mark.parametrize(
    "data", [b"", b"{}", a_question(tokens=0), a_question(salt="x"), a_question(salt="00" * 65), a_question(x=1)]
)
async def test_a_question_that_is_none(house: House, data: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        house.routers[0].explainer.answer(data)


async def test_a_worker_that_was_taken_out_gets_nothing_until_it_is_taken_back(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    router, named = house.routers[0], json.dumps({"worker": both.process}).encode()
    status = router.eject(named, True)
    assert status.models[MODEL].workers[0].draining
    both.beat()
    assert isinstance(await house.submit(a_job()), Queue)
    router.eject(named, False)
    assert isinstance(await house.submit(a_job(resume=True, attempt=2)), Accepted)


async def test_a_worker_that_nobody_knows(house: House) -> None:
    with pytest.raises(NotFound):
        house.routers[0].eject(b'{"worker": "x"}', True)
    with pytest.raises(UnreadableMessage):
        house.routers[0].eject(b"[]", True)
