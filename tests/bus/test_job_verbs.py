"""What operators ask of jobs: pages that miss nothing, and questions that are none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.admin import CancelAnswer, HeldJob, PageQuestion
from schemas.errors import UnreadableMessage
from schemas.job import Tier
from schemas.lifecycle import State
from services.bus.interface import Msg
from services.bus.job_verbs import job_verbs, page


def a_job(job: str, run: str = "", age_s: float | None = None) -> HeldJob:
    return HeldJob(job=job, state=State.DECODING, model="m", tier=Tier.PAID, lane=1, run=run, age_s=age_s)


rows = st.lists(st.builds(a_job, st.sampled_from("abcdef"), st.sampled_from("xyz")), unique_by=lambda one: (one.job, one.run))


@given(rows, st.integers(1, 5))
def test_pages_together_are_all_of_them_once(held: list[HeldJob], limit: int) -> None:
    seen, after = list[HeldJob](), ""
    while True:
        answer = page("w1", held, PageQuestion(limit=limit, after=after))
        assert len(answer.jobs) <= limit
        assert answer.total == len(held)
        seen += answer.jobs
        if not answer.next:
            break
        after = answer.next
    assert seen == sorted(held, key=lambda one: one.job + one.run)


def test_the_old_ones_only() -> None:
    held = [a_job("a", age_s=1.0), a_job("b", age_s=60.0), a_job("c")]
    answer = page("w1", held, PageQuestion(older_s=30.0))
    assert [one.job for one in answer.jobs] == ["b"]
    assert answer.total == 1


@pytest.mark.parametrize("data", [b"[]", b"x", b'{"limit": 0}', b'{"limit": 1001}', b'{"limits": 1}'])
async def test_a_question_that_is_none(data: bytes) -> None:
    verbs = job_verbs("w1", list, lambda job: CancelAnswer(job=job))
    with pytest.raises(UnreadableMessage):
        await verbs["jobs"](Msg("s", data))
    with pytest.raises(UnreadableMessage):
        await verbs["cancel"](Msg("s", data))


async def test_nothing_asked_is_the_first_page_and_cancels_nothing() -> None:
    ended: list[str] = []

    def cancel(job: str) -> CancelAnswer:
        ended.append(job)
        return CancelAnswer(job=job)

    verbs = job_verbs("w1", lambda: [a_job("a")], cancel)
    assert await verbs["jobs"](Msg("s", b"")) == page("w1", [a_job("a")], PageQuestion())
    with pytest.raises(UnreadableMessage):
        await verbs["cancel"](Msg("s", b""))
    await verbs["cancel"](Msg("s", json.dumps({"job": "a"}).encode()))
    assert ended == ["a"]
