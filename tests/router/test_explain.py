"""What an operator is told of a placement, what a caller is who asks, and workers that are taken out."""

from __future__ import annotations

import json
from random import Random

import pytest
from msgspec.structs import replace

from schemas.codec import encode_json
from schemas.errors import NotFound, UnreadableMessage
from schemas.explanation import MOST, PassedOver
from schemas.placement import Accepted, Queue, Refused
from schemas.state import QueueReport, Role
from services.bus.typed import send
from services.router.dispatch import NotTaken, Outcome
from services.router.question import MOST_TOKENS, read_question
from tests.router.fakes import MODEL, SUBJECTS, a_job, a_process
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
    [full, leaving, good] = [
        (await house.workers(Role.BOTH, **changes))[0] for changes in ({"slots": 0}, {"draining": True}, {"blocks": 99})
    ]
    said = house.routers[0].explainer.answer(a_question())
    assert [one.process for one in said.candidates] == [good.process]
    assert {(one.process, one.why) for one in said.passed_over} == {(full.process, "no_credit"), (leaving.process, "draining")}
    too_long = house.routers[0].explainer.answer(a_question(tokens=1024))
    assert PassedOver(process=good.process, why="too_small") in too_long.passed_over


async def test_it_is_bounded(house: House) -> None:
    await house.workers(*[Role.BOTH] * (MOST + 3))
    await house.workers(*[Role.BOTH] * (MOST + 4), slots=0)
    said = house.routers[0].explainer.answer(a_question())
    assert (len(said.candidates), len(said.passed_over), said.left_out) == (MOST, MOST, 7)
    assert len(encode_json(said)) < 10_000


async def test_who_was_asked_and_did_not_take_it_comes_first(house: House) -> None:
    await house.workers(*[Role.BOTH] * MOST, slots=0)
    explainer = house.routers[0].explainer
    tried = tuple(NotTaken(f"w{number}", "busy") for number in range(MOST - 1))
    said = explainer.tell(explainer.look(a_job()), Outcome(Queue(router="r"), None, tried))
    assert [one.why for one in said.passed_over] == ["busy"] * (MOST - 1) + ["no_credit"]
    assert said.left_out == MOST - 1


async def test_a_caller_that_asks_hears_it_with_the_answer(house: House) -> None:
    prefill, decode, bad = await house.workers(Role.PREFILL, Role.DECODE, Role.DECODE)
    bad.refuses.add("lease")
    answers = [await house.submit(replace(a_job(), explain=True)) for _ in range(3)]  # whichever a tie begins with
    for answer in answers:
        assert isinstance(answer, Accepted)
        told = answer.explanation
        assert told is not None
        assert (told.outcome, told.prefill, told.decode) == ("placed", prefill.process, decode.process)
        assert {one.process for one in told.candidates} == {prefill.process, decode.process, bad.process}
    tried = [one for answer in answers if answer.explanation for one in answer.explanation.passed_over]
    assert set(tried) <= {PassedOver(process=bad.process, why="no_slot")}
    plain = await house.submit(a_job())
    assert isinstance(plain, Accepted)
    assert plain.explanation is None


async def test_a_caller_that_asks_hears_why_it_waits_or_is_refused(house: House) -> None:
    [both] = await house.workers(Role.BOTH)
    refused = await house.submit(replace(a_job(tokens=5_000), explain=True))
    assert isinstance(refused, Refused)
    assert refused.explanation is not None
    assert refused.explanation.outcome == "refused"
    send(house.edge, SUBJECTS.queue(MODEL), QueueReport(router=a_process("router"), model=MODEL, waiting={"paid": 1}))
    queued = await house.submit(replace(a_job(), explain=True))
    assert isinstance(queued, Queue)
    assert queued.explanation is not None
    assert (queued.explanation.outcome, queued.explanation.reason) == ("queue", "others_wait")
    assert [one.process for one in queued.explanation.candidates] == [both.process]


async def test_asking_of_a_model_that_nobody_serves_leaves_nothing_behind(house: House) -> None:
    for number in range(10):
        house.routers[0].explainer.answer(a_question(model=f"nobody-{number}"))
    assert not house.routers[0].entry._gates


async def test_a_long_prompt_is_not_drawn_token_by_token() -> None:
    """A router draws from the system, a call a number: a million of them held everything up for two seconds."""

    class Counted(Random):
        calls = 0

        def getrandbits(self, k: int, /) -> int:
            self.calls += 1
            return super().getrandbits(k)

        def random(self) -> float:
            self.calls += 1
            return super().random()

    random = Counted(1)
    assert read_question(a_question(tokens=MOST_TOKENS), 1e9, random).prompt_tokens == MOST_TOKENS
    assert random.calls < 100


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
