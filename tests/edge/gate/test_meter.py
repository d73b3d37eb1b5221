"""Reservations: all limits of a request or none, settled once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.errors import EdgeUnavailable, HeadraceError, InsufficientQuota, InvalidRequest, RateLimited, TokensLimited
from schemas.job import Tier
from services.clock import ManualClock
from services.edge.gate import budgets
from services.edge.gate.budgets import Budgets
from services.edge.gate.limits import NONE, Limits
from services.edge.gate.meter import REQUESTS, TOKENS, Meter, Reservation
from services.edge.gate.records import Caller, Used
from services.edge.gate.windows import DAY, name, resets_in
from services.edge.tenant import tenant
from services.telemetry.metrics import Metrics
from tests.edge.fakes import SECRET, FakeCounters, FakeUsage
from tests.waiting import PATIENCE_S, until


def caller(limits: Limits = NONE, tenant_limits: Limits = NONE, *, tier: Tier = Tier.PAID, key: str = "k") -> Caller:
    return Caller(tenant(SECRET, "acme"), tier, key, None, limits, tenant_limits)


def used(tokens: int, job: str = "j") -> Used:
    return Used(job, "m", tokens, 0)


class Edges:
    """Several edges over one counter stream."""

    def __init__(self, count: int = 1) -> None:
        self.clock = ManualClock()
        self.counters = FakeCounters()
        self.usage = FakeUsage()
        self.metrics = Metrics.collecting("e")
        self.budgets = [Budgets(self.usage, f"e{number}", self.clock, Metrics.null()) for number in range(count)]
        self.meters = [Meter(self.counters, budgets, self.clock, self.metrics) for budgets in self.budgets]
        self.meter = self.meters[0]

    async def refusal(self, who: Caller, prompt: int = 1, output: int = 1) -> type[HeadraceError] | None:
        try:
            await asked(self.meter, who, prompt, output)
        except HeadraceError as error:
            return type(error)
        return None


async def asked(meter: Meter, who: Caller, prompt: int = 1, output: int = 1) -> Reservation:
    """As a request to generate goes in: it is counted, then what it may use is reserved."""
    counted = await meter.count(who)
    try:
        return await meter.admit(who, prompt, output)
    except HeadraceError as error:
        counted.answered(error.status)
        raise


@asynccontextmanager
async def running(edges: Edges) -> AsyncIterator[None]:
    """The edges' tasks, which carry budgets to the database."""
    tasks = [asyncio.create_task(budgets.run()) for budgets in edges.budgets]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_limits_nothing_is_counted() -> None:
    edges = Edges()
    (await edges.meter.admit(caller(), 10**6, 10**6)).settle(used(5))
    assert not edges.counters.values


async def test_requests_of_a_key_and_of_its_tenant() -> None:
    edges = Edges()
    two, five = Limits(requests_per_minute=2), Limits(requests_per_minute=5)
    assert [await edges.refusal(caller(two, five)) for _ in range(3)] == [None, None, RateLimited]
    assert [await edges.refusal(caller(NONE, five, key="other")) for _ in range(4)] == [None, None, None, RateLimited]
    edges.clock.advance(61)
    assert await edges.refusal(caller(two, five)) is None


async def test_the_refusal_says_when_to_come_back() -> None:
    edges = Edges()
    who = caller(Limits(requests_per_minute=1))
    await edges.meter.count(who)
    with pytest.raises(RateLimited) as refused:
        await edges.meter.count(who)
    assert refused.value.retry_after == pytest.approx(60 - edges.clock.wall() % 60)


async def test_tokens_are_reserved_whole_and_come_back_unused() -> None:
    edges = Edges()
    who = caller(Limits(tokens_per_minute=100))
    reservation = await edges.meter.admit(who, 20, 70)
    assert await edges.refusal(who, 10, 10) is TokensLimited
    reservation.settle(used(30))
    reservation.settle(used(0))
    edges.clock.advance(1.1)  # what was believed to be spent is asked for again
    assert await edges.refusal(who, 20, 50) is None
    edges.clock.advance(1.1)
    assert await edges.refusal(who, 1, 0) is TokensLimited


async def test_a_request_that_is_refused_is_one() -> None:
    """It was read, rendered and tokenised, and may be sent again and again."""
    edges = Edges()
    wrong = caller(Limits(requests_per_minute=2, prompt_tokens=10))
    assert [await edges.refusal(wrong, 11, 1) for _ in range(3)] == [InvalidRequest, InvalidRequest, RateLimited]
    over = caller(Limits(requests_per_minute=3, tokens_per_minute=30), key="other")
    assert [await edges.refusal(over, 20, 0) for _ in range(4)] == [None, TokensLimited, TokensLimited, RateLimited]


async def test_a_refused_request_takes_no_tokens() -> None:
    edges = Edges()
    who = caller(Limits(tokens_per_minute=30), Limits(tokens_per_minute=20))
    assert [await edges.refusal(who, 15, 0) for _ in range(6)] == [None] + [TokensLimited] * 5
    edges.clock.advance(1.1)  # what was believed to be spent is asked for again
    assert await edges.refusal(who, 5, 0) is None
    other = caller(Limits(tokens_per_minute=30), key="k")
    assert await edges.refusal(other, 10, 0) is None


async def test_what_the_tenant_s_limit_keeps_out_is_none_of_the_key_s() -> None:
    edges = Edges()
    one = Limits(requests_per_minute=1)
    assert await edges.refusal(caller(NONE, one)) is None
    assert await edges.refusal(caller(one, one, key="other")) is RateLimited
    assert await edges.refusal(caller(one, key="other")) is None


@pytest.mark.parametrize("statuses", [(503,), (500, 503)])
async def test_what_we_could_not_serve_gives_everything_back_once(statuses: tuple[int, ...]) -> None:
    edges = Edges()
    who = caller(Limits(requests_per_minute=1, tokens_per_minute=100))
    counted = await edges.meter.count(who)
    (await edges.meter.admit(who, 50, 50)).undo()
    for status in statuses:
        counted.answered(status)
    assert await edges.refusal(who, 50, 50) is None
    assert await edges.refusal(who, 0, 0) is RateLimited


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        (Limits(prompt_tokens=10), "messages"),
        (Limits(output_tokens=10), "max_tokens"),
        (Limits(tokens_per_minute=20), "max_tokens"),
        (Limits(tokens_per_day=21), "max_tokens"),
        (Limits(tokens_per_month=21), "max_tokens"),
    ],
)
async def test_what_can_never_fit_is_no_429(limits: Limits, param: str) -> None:
    for who in (caller(limits), caller(NONE, limits)):
        with pytest.raises(InvalidRequest) as refused:
            await Edges().meter.admit(who, 11, 11)
        assert refused.value.param == param
        async with running(edges := Edges()):
            await edges.meter.admit(who, 10, 10)


async def test_counters_down() -> None:
    """faults.md, gateway, quota store down: who pays spends what this edge holds, then hears that nobody knows; who does not
    hears it at once. The metric is the alarm."""
    edges = Edges()
    limits = Limits(requests_per_minute=64)
    paid, free = caller(limits), caller(limits, tier=Tier.FREE, key="free")
    assert [await edges.refusal(who) for who in (paid, free)] == [None, None]
    edges.counters.down = True
    held = next(iter(edges.meter.allotments())).held
    assert [await edges.refusal(paid) for _ in range(held + 1)] == [None] * held + [EdgeUnavailable]
    assert await edges.refusal(free) is None  # the counter is asked for more, behind its back
    *_, its = edges.meter.allotments()
    await until(lambda: its.down)
    left = edges.meter.left(free, REQUESTS)
    assert left is not None
    assert left.remaining > 0
    assert await edges.refusal(free) is EdgeUnavailable
    assert b'headrace_counter_failures_total{kind="requests"} ' in edges.metrics.prometheus_text()


async def test_over_three_edges_never_more() -> None:
    edges = Edges(3)
    who = caller(Limits(requests_per_minute=100, tokens_per_minute=5000))

    async def one(number: int) -> bool:
        try:
            await asked(edges.meters[number % 3], who, 20, 20)
        except RateLimited:
            return False
        return True

    assert 80 <= sum(await asyncio.gather(*map(one, range(500)))) <= 100


async def test_what_is_left_is_the_narrowest() -> None:
    edges = Edges()
    who = caller(Limits(requests_per_minute=640), Limits(requests_per_minute=64))
    await edges.meter.count(who)
    left = edges.meter.left(who, REQUESTS)
    assert left is not None
    assert left.limit == 64
    assert edges.meter.left(who, TOKENS) is None


async def test_a_spent_budget_is_no_rate_limit() -> None:
    edges = Edges()
    who = caller(NONE, Limits(tokens_per_day=100))
    async with running(edges):
        (await edges.meter.admit(who, 50, 50)).settle(used(90))
        assert await edges.refusal(who, 5, 6) is InsufficientQuota
        edges.clock.advance(1.0)
        assert await edges.refusal(who, 5, 5) is None
        edges.clock.advance(86_400.0)
        assert await edges.refusal(who, 50, 50) is None


async def test_who_waits_while_the_day_ends_gets_that_days() -> None:
    edges = Edges()
    edges.clock.epoch += resets_in(DAY, edges.clock.wall()) - 0.1
    waiting = asyncio.create_task(edges.meter.admit(caller(Limits(tokens_per_day=100)), 50, 50))
    await until(lambda: edges.budgets[0]._purses)
    edges.clock.advance(0.2)
    async with running(edges):
        (await asyncio.wait_for(waiting, PATIENCE_S)).settle(used(60))
        await until(lambda: not edges.budgets[0]._purses)
    assert list(edges.usage.spent.values()) == [60]


async def test_who_asks_often_never_waits_for_the_database() -> None:
    """Only the first request does: of what requests reserve, up to a 64th of the budget, there is always one held."""
    edges = Edges()
    who = caller(Limits(tokens_per_day=64_000), Limits(tokens_per_month=64_000))

    async def held() -> None:
        await until(lambda: all(purse.free >= 1000 for purse in edges.budgets[0]._purses.values()))

    async with running(edges):
        await edges.meter.admit(who, 500, 500)
        for number in range(30):
            await held()
            asked = edges.usage.asked
            reservation = await edges.meter.admit(who, 500, 500)
            assert edges.usage.asked == asked
            reservation.settle(used(1000, f"j{number}"))


async def test_what_is_promised_may_come_back() -> None:
    edges = Edges()
    who = caller(Limits(tokens_per_month=100))
    async with running(edges):
        reservation = await edges.meter.admit(who, 50, 50)
        assert await edges.refusal(who, 5, 5) is RateLimited
        reservation.settle(used(60))
        edges.clock.advance(1.0)
        assert await edges.refusal(who, 20, 20) is None


async def test_requests_that_run_at_once() -> None:
    edges = Edges(2)
    who = caller(Limits(concurrent=2), Limits(concurrent=3))
    async with running(edges):
        held = [await meter.admit(who, 1, 1) for meter in edges.meters]
        for meter in edges.meters:
            with pytest.raises(RateLimited):
                await meter.admit(who, 1, 1)
        held[0].settle(used(2))
        edges.clock.advance(1.0)
        await until(lambda: not sum(edges.usage.held["key-k", "running"].values()) - 1)
        held.append(await edges.meters[1].admit(who, 1, 1))
        other = caller(NONE, Limits(concurrent=3), key="other")
        held.append(await edges.meters[0].admit(other, 1, 1))
        assert await edges.refusal(other) is RateLimited


async def test_every_request_that_ran_is_booked() -> None:
    edges = Edges()
    async with running(edges):
        (await edges.meter.admit(caller(), 5, 5)).settle(used(7, "one"))
        (await edges.meter.admit(caller(), 5, 5)).undo()
        await until(lambda: edges.usage.entries)
    assert [(entry.tenant, entry.key, entry.used.tokens) for entry in edges.usage.entries.values()] == [("acme", "k", 7)]


async def test_a_fault_of_the_store_is_not_the_end() -> None:
    edges = Edges()
    exchange, faults = edges.usage.exchange, [RuntimeError("a bug")]

    async def once(*arguments: object) -> object:
        if faults:
            raise faults.pop()
        return await exchange(*arguments)  # type: ignore[arg-type]

    edges.usage.exchange = once  # type: ignore[method-assign,assignment]
    async with running(edges):
        (await edges.meter.admit(caller(), 5, 5)).settle(used(7, "one"))
        await until(lambda: edges.usage.entries)


async def test_what_a_row_counts_is_held_here_no_more() -> None:
    """The row of a job that outlives this edge was charged: this edge gives back all that it was promised, and books nothing."""
    edges = Edges()
    day = ("key-k", name(DAY, edges.clock.wall()))
    who = caller(Limits(tokens_per_day=100, tokens_per_minute=200, concurrent=1))
    async with running(edges):
        reservation = await edges.meter.admit(who, 50, 50)
        bill = reservation.bill("m", 50, 0.5)
        assert (bill.key, bill.model, bill.prompt_tokens, bill.price, bill.budgets) == ("k", "m", 50, 0.5, (day,))
        edges.usage.spent[day] += 60
        reservation.hand_over(60)
        reservation.settle(used(100))
        await until(lambda: not sum(edges.usage.held[day].values()))
        assert await edges.refusal(who, 20, 21) is InsufficientQuota
        edges.clock.advance(1.0)
        assert await edges.refusal(who, 20, 20) is None
    assert not edges.usage.entries


async def test_an_edge_that_ends_while_the_database_is_locked_books_when_it_is_free() -> None:
    edges = Edges()
    (await edges.meter.admit(caller(), 5, 5)).settle(used(7, "one"))
    edges.usage.down = True
    closing = asyncio.create_task(edges.budgets[0].close())
    await until(lambda: edges.usage.asked >= 2)
    assert not closing.done()
    edges.usage.down = False
    await closing
    assert list(edges.usage.entries) == ["one"]


async def test_an_edge_that_ends_without_a_database_says_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it holds of budgets is no reason to wait: its lease ends."""
    monkeypatch.setattr(budgets, "CLOSE_S", 0.01)
    edges = Edges()
    async with running(edges):
        reservation = await edges.meter.admit(caller(Limits(tokens_per_day=100)), 5, 5)
    edges.usage.down = True
    await edges.budgets[0].close()
    assert not caplog.records[1:]
    reservation.settle(used(7, "one"))
    await edges.budgets[0].close()
    assert caplog.records[-1].levelname == "ERROR"
    assert caplog.records[-1].getMessage().startswith("usage is lost")
