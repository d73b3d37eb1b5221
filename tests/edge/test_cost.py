"""What a request cost, however it ended: in its usage, in the ledger and in the metric of its tenant and model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from schemas.errors import JobFailed
from schemas.reply import FinishReason
from schemas.state import Capabilities
from services.edge.gate.limits import Limits
from services.edge.gate.records import Used
from services.edge.jobs.draft import Delta
from services.text.grammar import KINDS
from tests.edge.fakes import MODEL, Api, Script, says
from tests.edge.test_api_keys import CHAT, ask
from tests.text.tiny import byte_ids
from tests.waiting import until

PATH = "/v1/chat/completions"
TWO = Script(deltas=[[Delta(0, byte_ids("a")), Delta(1, byte_ids("bc"))], [Delta(at, [], FinishReason.STOP) for at in (0, 1)]])
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
COST = 0.125
"""Each fake job takes 0.25 s, at 0.5 a second."""


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api(price_per_compute_s=0.5)
    made.jobs.capabilities = Capabilities(seed=True, n=True, grammar=KINDS)
    task = asyncio.create_task(made.budgets.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def booked(api: Api) -> Used:
    """The only entry of the ledger."""
    await until(lambda: api.usage.entries)
    (entry,) = api.usage.entries.values()
    assert entry.tenant == "acme"
    return entry.used


def metric(api: Api) -> list[str]:
    return [line for line in api.metrics.prometheus_text().decode().splitlines() if line.startswith("headrace_cost_total{")]


@pytest.mark.parametrize(
    ("fields", "script"),
    [
        ({"n": 2}, TWO),
        ({"response_format": {"type": "json_object"}}, says("{}")),
        ({"tools": [TOOL], "tool_choice": "required"}, says('<tool_call>{"name":"look","arguments":{}}</tool_call>')),
        ({"stop": "l"}, says("hello")),
    ],
)
async def test_of_choices_grammars_calls_and_stops(api: Api, fields: dict[str, Any], script: Script) -> None:
    """One job, whatever it makes: each frame tells the whole run's compute."""
    api.jobs.default = script
    answer = await ask(api, PATH, api.keys.make(), body=CHAT | fields)
    assert answer.status_code == 200, answer.text
    used = await booked(api)
    assert answer.json()["usage"]["cost"] == used.cost == COST
    assert used.completion_tokens == answer.json()["usage"]["completion_tokens"]
    assert metric(api) == [f'headrace_cost_total{{model="{MODEL}",tenant="acme"}} {COST}']


@pytest.mark.parametrize("stream", [True, False])
async def test_of_an_answer_whose_client_left(api: Api, stream: bool) -> None:
    """It pays for what was computed until then, once, and gets the rest of its budget back."""
    key = api.keys.make(limits=Limits(tokens_per_day=1000))
    api.jobs.default = Script([byte_ids("hel")], finish=None)
    leaving = asyncio.create_task(ask(api, PATH, key, body=CHAT | {"stream": stream, "max_tokens": 400}))
    await until(lambda: api.jobs.handles and api.jobs.handles[0].waiting.is_set())
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert api.jobs.handles[0].cancelled.is_set()
    used = await booked(api)
    assert (used.completion_tokens, used.cost) == (3, COST)
    await until(lambda: sum(api.usage.spent.values()) == used.tokens)
    assert metric(api) == [f'headrace_cost_total{{model="{MODEL}",tenant="acme"}} {COST}']


async def test_of_one_whose_client_left_while_it_waited(api: Api) -> None:
    """Nobody began it: it used nothing of what it was promised, and costs nothing."""
    key = api.keys.make(limits=Limits(tokens_per_day=1000))
    api.jobs.default = Script(began=False, finish=None)
    leaving = asyncio.create_task(ask(api, PATH, key, body=CHAT | {"stream": True, "max_tokens": 400}))
    await until(lambda: api.jobs.handles and api.jobs.handles[0].waiting.is_set())
    api.jobs.handles[0].compute_s = 0.0
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    used = await booked(api)
    assert (used.tokens, used.cost) == (0, 0.0)
    await until(lambda: not sum(purse.promised for purse in api.budgets._purses.values()))
    assert not sum(api.usage.spent.values())


@pytest.mark.parametrize("steps", [[], [byte_ids("a")]])
async def test_of_one_that_failed(api: Api, steps: list[list[int]]) -> None:
    """Before its first token it costs nothing."""
    api.jobs.scripts = [Script(steps, error=JobFailed("broken"))]
    key = api.keys.make()
    assert (await ask(api, PATH, key, body=CHAT)).status_code == 500
    if not steps:
        assert (await ask(api, PATH, key, body=CHAT)).status_code == 200
    used = await booked(api)
    assert (used.job, used.completion_tokens, used.cost) == (api.jobs.handles[-1].id, len(steps) or 5, COST)
