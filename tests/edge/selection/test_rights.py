"""Keys that may use some models only, and who is paid for an answer."""

from __future__ import annotations

import openai
import pytest

from schemas.errors import (
    Unavailable,
)
from tests.edge.fakes import Script, says
from tests.edge.selection.rig import api, sdk


async def test_a_key_s_models() -> None:
    edge = api()
    cases = {
        ("a", "fast"): {"a": 200, "fast": 200, "b": 403, "auto": 200, "c": 403},
        ("fast",): {"fast": 200, "a": 403, "auto": 200},
        ("b",): {"b": 200, "fast": 403, "auto": 403},
        ("auto",): {"auto": 200, "chat": 200, "a": 403},
    }
    for names, expected in cases.items():
        async with sdk(edge, edge.keys.make(models=frozenset(names))) as client:
            for name, status in expected.items():
                try:
                    answer = await client.chat.completions.with_raw_response.create(
                        model=name, messages=[{"role": "user", "content": "hi"}]
                    )
                    assert (status, answer.parse().model) == (200, "b" if name == "b" else "a"), (names, name)
                except openai.PermissionDeniedError:
                    assert status == 403, (names, name)


async def test_a_stand_in_has_to_be_the_key_s_too() -> None:
    edge = api()
    edge.jobs.alive = {"a", "b"}
    async with sdk(edge, edge.keys.make(models=frozenset({"c", "a"}))) as client:
        answer = await client.chat.completions.create(model="c", messages=[{"role": "user", "content": "hi"}])
        assert answer.model == "a"
    async with sdk(edge, edge.keys.make(models=frozenset({"c"}))) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="c", messages=[{"role": "user", "content": "hi"}])


async def test_who_answers_is_paid() -> None:
    edge = api(price_per_compute_s=1.0, model_prices={"b": 4.0})
    edge.jobs.scripts = [Script(refuse=Unavailable("x")), says("ok")]
    assert (await edge.post(model="c")).json()["usage"]["cost"] == 1.0  # 0.25 s
    assert (await edge.post(model="fast")).json()["usage"]["cost"] == 0.25
    await edge.budgets.close()
    assert [entry.used.model for entry in edge.usage.entries.values()] == ["b", "a"]
    assert 'headrace_requests_total{model="b",outcome="stop",status="200"} 1.0' in edge.metrics.prometheus_text().decode()
