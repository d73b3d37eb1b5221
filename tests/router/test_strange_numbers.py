"""What a worker says of itself is not trusted: whatever numbers are in its state, others get their work."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.codec import decode, encode
from schemas.errors import UnreadableMessage
from schemas.placement import Accepted
from schemas.state import Credits, Rates, Role, WorkerState
from services.clock import ManualClock
from services.router.placement import Impossible, Local, NoCredit, Pair, place
from services.router.placement_request import Request
from services.router.report import card
from services.router.view import View
from tests.router.fakes import MODEL, SUBJECTS, a_job, a_process, a_state
from tests.router.harness import House
from tests.schemas.numbers import EXTREMES, numbers, with_number
from tests.schemas.samples import every
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_over")
P, D, STRANGE = a_process("p"), a_process("d"), a_process("strange")
FILLED = replace(next(state for state in every() if isinstance(state, WorkerState)), process=STRANGE, model=MODEL)
"""Every field of it says something."""
counts = st.integers(0, 9) | st.integers(0, 2**53)
tokens = st.integers(1, 2**11) | st.integers(1, 2**31 - 1)
rates = st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1e15]) | st.floats(0.0, 1e15)
FIELDS = {
    "role": st.sampled_from(Role),
    "sent": st.floats(0.0, 1e11),
    "context_length": tokens,
    "block_tokens": st.sampled_from([1, 16]),
    "kv_total": st.integers(0, 2**49) | st.integers(0, 200),
    "credits": st.builds(Credits, version=counts, prefill_tokens=counts, decode_slots=counts, kv_blocks=counts),
    "rates": st.builds(Rates, prefill_tokens_s=rates, decode_step_s=st.floats(0.0, 1e10), fetch_tokens_s=rates),
    **dict.fromkeys(("queued", "running", "backlog", "yielding", "yielding_queued", "steps"), counts),
    **dict.fromkeys(("stalled", "draining"), st.booleans()),
}
states = st.fixed_dictionaries(FIELDS).map(lambda values: a_state(STRANGE, **values))
requests = st.builds(
    Request,
    tokens=st.integers(1, 900),
    hits=st.dictionaries(st.sampled_from([P, D, STRANGE]), st.integers(1, 9)),
    patience=st.sampled_from([0.0, 1.0]),
    urgent=st.booleans(),
)


class Steady:
    def steady_for(self) -> float:
        return float("inf")


def well(clock: ManualClock) -> View:
    view = View(clock, Steady())
    view.observe(a_state(P, Role.PREFILL, rates=Rates(prefill_tokens_s=1000.0)))
    view.observe(a_state(D, Role.DECODE, rates=Rates(decode_step_s=0.02)))
    return view


@given(st.lists(states, min_size=1, max_size=4), requests)
def test_whatever_a_worker_says_a_decision_is_made_and_it_is_forgotten_without_a_trace(
    said: list[WorkerState], request: Request
) -> None:
    view = well(ManualClock())
    for state in said:
        view.observe(decode(encode(state), WorkerState))  # what comes through the wire
        encode(card(MODEL, view.states(MODEL)))
        decision = place(view.pools(MODEL), request, view.now(), Random(1))
        assert not isinstance(decision, Impossible)
        if not isinstance(decision, NoCredit):
            why = decision.why
            assert why is not None
            assert max(map(abs, (why.ttft_s, why.wait_s, why.load, why.kv))) < 1e300
            view.undo(view.charge(decision.decode, slots=1, blocks=decision.blocks))
    view.remove(STRANGE)
    assert isinstance(place(view.pools(MODEL), request, view.now(), Random(1)), Pair | Local)


@pytest.mark.parametrize("path", numbers(FILLED))
async def test_a_poisoned_heartbeat_is_a_counted_refusal_and_others_get_their_work(
    house: House, path: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    await house.workers(Role.PREFILL, Role.DECODE, slots=8)
    unreadable = 0
    for number in EXTREMES:
        data = with_number(FILLED, path, number)
        unreadable += not _readable(data)
        house.edge.publish(SUBJECTS.worker_state(Role.PREFILL, MODEL, STRANGE), data)
    await until(lambda: sum(n for (kind, _), n in house.refusals.refused.items() if kind == "state") == unreadable)
    assert unreadable >= 5
    house.routers[0].view.remove(STRANGE)  # whoever could be read counts as a worker, which is not there to answer
    assert isinstance(await house.submit(a_job()), Accepted)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def _readable(data: bytes) -> bool:
    try:
        decode(data, WorkerState)
    except UnreadableMessage:
        return False
    return True
