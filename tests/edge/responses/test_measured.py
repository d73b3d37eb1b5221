"""Every request for a response is in the request metrics once, also one in the background, whose end is counted by itself."""

from __future__ import annotations

import pytest

from schemas.errors import JobFailed, Unavailable
from services.edge.gate.limits import Limits
from tests.edge.fakes import MODEL, Script, says
from tests.edge.responses.rig import ResponsesApi
from tests.text.tiny import byte_ids
from tests.waiting import until


async def test_answers_and_refusals(api: ResponsesApi) -> None:
    await api.respond()
    await api.respond(stream=True)
    api.jobs.scripts = [Script(refuse=Unavailable("x")), Script([byte_ids("a")], error=JobFailed("x"))]
    await api.respond()
    await api.respond(stream=True)
    await api.respond(model="none of ours")
    await api.respond(input=[])
    await api.respond(previous_response_id="resp_none")
    assert api.counted() == {
        (MODEL, "stop", "200"): 2,
        (MODEL, "no_capacity", "503"): 1,
        (MODEL, "job_failed", "200"): 1,
        ("unknown", "model_not_found", "404"): 1,
        (MODEL, "empty_array", "400"): 1,
        (MODEL, "previous_response_not_found", "404"): 1,
    }


async def test_in_the_background(api: ResponsesApi) -> None:
    api.detached.scripts = [says("a"), says("b"), Script(refuse=Unavailable("x"))]
    name = (await api.respond(background=True)).json()["id"]
    await api.respond(background=True, stream=True)
    await api.respond(background=True)
    counted = {(MODEL, "queued", "200"): 2, (MODEL, "no_capacity", "503"): 1}
    assert api.counted() == counted
    ended = f'headrace_background_responses_total{{model="{MODEL}",status="completed"}} 2.0'
    await until(lambda: ended in api.metrics.prometheus_text().decode())
    await api.ask("GET", f"/v1/responses/{name}?stream=true")
    await api.ask("DELETE", f"/v1/responses/{name}")
    assert api.counted() == counted


@pytest.mark.parametrize("background", [False, True])
async def test_each_is_a_request_of_the_minute_unless_we_could_not_serve_it(api: ResponsesApi, background: bool) -> None:
    key = api.keys.make(limits=Limits(requests_per_minute=3))
    unserved = Script(refuse=Unavailable("x"))
    api.jobs.scripts, api.detached.scripts = [unserved], [unserved]
    asked = ({}, {"temperature": 9}, {"previous_response_id": "resp_none"}, {}, {})
    answers = [await api.respond(key, background=background, **fields) for fields in asked]
    assert [answer.status_code for answer in answers] == [503, 400, 404, 200, 429]
    made = answers[3].json()["id"]
    assert (await api.ask("GET", f"/v1/responses/{made}", key)).status_code == 200
    assert (await api.ask("DELETE", f"/v1/responses/{made}", key)).status_code == 200
