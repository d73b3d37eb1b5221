from __future__ import annotations

from dataclasses import dataclass

import pytest

from schemas.state import Capabilities, Cause, Credits, Rates, Role, WorkerState
from services.bus.silence import SILENT_S
from services.clock import ManualClock
from services.router.breaker import FAILURES, OPEN_S, SLOW_S
from services.router.placement_workers import Worker
from services.router.view import FORGET_S, View
from tests.router.fakes import MODEL, a_process, a_state


@dataclass
class Line:
    steady: float = float("inf")

    def steady_for(self) -> float:
        return self.steady


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def view(clock: ManualClock, line: Line) -> View:
    return View(clock, line)


D1 = a_process("d1")


def state(version: int = 1, process: str = D1, **changes: object) -> WorkerState:
    credits = Credits(version=version, prefill_tokens=512, decode_slots=4, kv_blocks=100)
    return a_state(process, Role.DECODE, **({"credits": credits} | changes))


def only(view: View) -> Worker:
    [worker] = view.workers(MODEL)
    return worker


def test_a_beat_makes_a_worker_live(view: View) -> None:
    assert view.models() == set()
    view.observe(state())
    assert view.models() == {MODEL}
    assert view.workers("another") == []
    assert (only(view).decode_slots, only(view).kv_blocks) == (4, 100)


def test_silence_takes_a_worker_out_and_a_beat_brings_it_back(view: View, clock: ManualClock) -> None:
    view.observe(state())
    clock.advance(SILENT_S - 0.1)
    assert view.workers(MODEL)
    clock.advance(0.2)
    assert not view.workers(MODEL)
    view.observe(state(2))
    assert view.workers(MODEL)


def test_silence_means_nothing_while_our_own_bus_is_down_or_just_back(view: View, clock: ManualClock, line: Line) -> None:
    view.observe(state())
    line.steady = 0.0
    clock.advance(100.0)
    assert view.workers(MODEL)
    line.steady = SILENT_S - 0.1
    assert view.workers(MODEL)
    line.steady = SILENT_S + 0.1
    assert not view.workers(MODEL)


@pytest.mark.parametrize("cause", [Cause.KILLED, Cause.REPLACED, Cause.LEFT])
def test_the_dead_are_gone_at_once_and_for_good(view: View, cause: Cause) -> None:
    view.observe(state())
    view.died(D1, cause)
    assert not view.workers(MODEL)
    view.observe(state(2))  # a beat that was still on its way
    assert not view.workers(MODEL)


def test_disconnected_is_no_death(view: View, clock: ManualClock) -> None:
    """It is marked until its next beat; a word that comes after one means nothing."""
    view.observe(state())
    view.died(D1, Cause.DISCONNECTED)
    assert not only(view).degraded
    clock.advance(0.5)
    view.died(D1, Cause.DISCONNECTED)
    assert only(view).degraded
    view.observe(state(2))
    assert not only(view).degraded


def test_who_says_that_its_engine_stands_still_is_degraded_until_it_says_otherwise(view: View) -> None:
    view.observe(state(stalled=True))
    assert only(view).degraded
    view.observe(state(2))
    assert not only(view).degraded


def test_a_newer_start_replaces_the_older_one(view: View) -> None:
    older, newer = a_process("d2", 1_000.0), a_process("d2", 2_000.0)
    assert view.observe(state(process=older)) == []
    assert view.observe(state(process=newer)) == [older]
    assert view.observe(state(2, process=older)) == [], "a late beat of the dead"
    assert [worker.process for worker in view.workers(MODEL)] == [newer]


def test_a_start_that_left_cleanly_is_not_called_dead(view: View) -> None:
    older, newer = a_process("d2", 1_000.0), a_process("d2", 2_000.0)
    view.observe(state(process=older))
    view.died(older, Cause.LEFT)
    assert view.observe(state(process=newer)) == []


def test_newer_credits_stand(view: View) -> None:
    view.observe(state(5))
    view.learn(D1, Credits(version=7, decode_slots=1))
    assert only(view).decode_slots == 1
    view.learn(D1, Credits(version=6, decode_slots=3))
    assert only(view).decode_slots == 1
    view.observe(state(6))
    assert only(view).decode_slots == 1, "a beat that was overtaken by an answer"
    view.observe(state(8))
    assert only(view).decode_slots == 4


def test_a_charge_counts_until_the_answer_contains_it(view: View) -> None:
    view.observe(state(1))
    charge = view.charge(D1, slots=1, blocks=10)
    assert (only(view).decode_slots, only(view).kv_blocks) == (3, 90)
    view.observe(state(2))
    assert only(view).decode_slots == 3, "a beat from before it was asked"
    view.settle(charge, Credits(version=3, decode_slots=3, kv_blocks=90))
    assert (only(view).decode_slots, only(view).kv_blocks) == (3, 90)


def test_a_lost_answer_counts_until_newer_credits(view: View) -> None:
    view.observe(state(1))
    view.lose(view.charge(D1, slots=1, blocks=10))
    assert only(view).decode_slots == 3
    view.observe(state(2))
    assert only(view).decode_slots == 4


def test_an_undone_charge_does_not_count(view: View) -> None:
    view.observe(state(1))
    view.undo(view.charge(D1, slots=1, blocks=10))
    assert (only(view).decode_slots, only(view).kv_blocks) == (4, 100)


def test_what_was_released_is_free_before_the_worker_says_so(view: View) -> None:
    view.observe(state(1))
    view.settle(view.charge(D1, slots=1, blocks=10), Credits(version=2, decode_slots=3, kv_blocks=90))
    view.give_back(D1, slots=1, blocks=10)
    assert (only(view).decode_slots, only(view).kv_blocks) == (4, 100)
    view.observe(state(3))
    assert (only(view).decode_slots, only(view).kv_blocks) == (4, 100)


def test_a_release_is_no_answer_that_a_breaker_counts(view: View, clock: ManualClock) -> None:
    view.observe(state(1))
    for _ in range(FAILURES):
        view.lose(view.charge(D1, slots=1))
    clock.advance(OPEN_S)
    breaker = view._entries[D1].breaker
    assert breaker.allowance == 1
    view.give_back(D1, slots=1, blocks=0)
    assert breaker.allowance == 1


def test_a_placed_prompt_is_queued_until_the_state_says_so(view: View) -> None:
    view.observe(state(1))
    charge = view.charge(D1, prefill_tokens=100)
    assert (only(view).queued, only(view).prefill_tokens) == (1, 412)
    view.settle(charge, Credits(version=2, prefill_tokens=412))
    assert (only(view).queued, only(view).prefill_tokens) == (1, 412), "credits say nothing of the queue's length"
    view.observe(state(3, queued=1))
    assert only(view).queued == 1


def test_charges_on_a_worker_that_is_gone_do_no_harm(view: View) -> None:
    view.observe(state(1))
    charge = view.charge(D1, slots=1)
    view.died(D1, Cause.KILLED)
    view.settle(charge, Credits(version=2))
    view.lose(view.charge(D1, slots=1))
    assert not view.workers(MODEL)


def test_old_memories_go(view: View, clock: ManualClock) -> None:
    view.observe(state(1))
    view.died(a_process("d9"), Cause.KILLED)
    clock.advance(FORGET_S + 1)
    view.forget_old()
    assert not view._entries
    assert not view._gone


def test_when_a_worker_is_free_is_predicted_from_its_backlog_and_what_was_placed(view: View, clock: ManualClock) -> None:
    rates = Rates(prefill_tokens_s=1000.0)
    view.observe(state(1, backlog=500, rates=rates))
    now = clock.monotonic()
    assert only(view).free_at == now + 0.5
    clock.advance(2.0)
    charge = view.charge(D1, prefill_tokens=100)
    assert only(view).free_at == now + 2.1, "it begins when it is placed, the backlog being done"
    view.settle(charge, Credits(version=2))
    view.observe(state(3, backlog=80, rates=rates))
    assert only(view).free_at == now + 2.08


def test_what_makes_way_for_an_urgent_prompt_is_part_of_the_wait(view: View) -> None:
    view.observe(state(1, backlog=500, queued=2, yielding=400, yielding_queued=1, rates=Rates(prefill_tokens_s=1000.0)))
    assert only(view).yield_s == pytest.approx(0.4)
    assert only(view).yield_queued == 1


def test_pools_are_by_kv_compat(view: View) -> None:
    view.observe(state(1, process=a_process("d1"), kv_compat="a"))
    view.observe(state(1, process=a_process("d2"), kv_compat="b"))
    view.observe(state(1, process=a_process("d3"), kv_compat="b"))
    assert sorted((pool.kv_compat, len(pool.decode)) for pool in view.pools(MODEL)) == [("a", 1), ("b", 2)]
    for worker in view.workers(MODEL):
        view.died(worker.process, Cause.KILLED)
    assert not view.pools(MODEL)
    assert view.models() == set()


def test_who_does_not_answer_is_left_out_and_comes_back_with_one_credit(view: View, clock: ManualClock) -> None:
    view.observe(state(1))
    for _ in range(FAILURES):
        view.lose(view.charge(D1, slots=1))
    assert only(view).degraded
    view.observe(state(3))
    assert only(view).degraded, "beats are no answers"
    clock.advance(OPEN_S)
    view.observe(state(4))
    assert not only(view).degraded
    charge = view.charge(D1, slots=1)
    assert only(view).degraded, "one at a time"
    view.settle(charge, Credits(version=5, decode_slots=4))
    view.observe(state(6))
    first, _ = view.charge(D1, slots=1), only(view)
    assert not only(view).degraded, "two at a time"
    view.charge(D1, slots=1)
    assert only(view).degraded
    view.settle(first, Credits(version=7, decode_slots=4), ok=False)
    assert only(view).degraded


def test_who_was_left_out_comes_back_without_a_beat(view: View, clock: ManualClock) -> None:
    view.observe(state(1))
    for _ in range(FAILURES):
        view.undo(view.charge(D1, slots=1), ok=False)
    assert only(view).degraded
    clock.advance(OPEN_S)
    assert not only(view).degraded


def test_slow_answers_are_failures(view: View, clock: ManualClock) -> None:
    view.observe(state(1))
    for version in range(2, 2 + FAILURES):
        charge = view.charge(D1, slots=1)
        clock.advance(SLOW_S + 0.01)
        view.settle(charge, Credits(version=version, decode_slots=4))
    assert only(view).degraded


def test_a_pool_knows_an_engine_that_begins_only_what_it_can_end(view: View) -> None:
    view.observe(state(capabilities=Capabilities(must_hand_off=True)))
    assert [pool.to_end for pool in view.pools(MODEL)] == [True]
