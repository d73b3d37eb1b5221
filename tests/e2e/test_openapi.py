"""Requests generated from our own OpenAPI document, against real processes: no failure of ours, every refusal in the envelope."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error

from tests.e2e.conftest import StartScripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_SAME_EACH_TIME = settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_makes_a_failure_of_ours(own_stack: StartScripted, mode: GenerationMode) -> None:
    """What the document allows, and what it does not."""
    up = own_stack()
    document = schemathesis.openapi.from_url(f"{up.url}/openapi.json", timeout=60)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) > 15
    answered = {each.path: _try(each, mode, up.model) for each in operations if mode is GenerationMode.POSITIVE or each.body}
    if mode is GenerationMode.POSITIVE:  # they reach the model, not only the gate
        assert all(answered[path][200] for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"))


def _try(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, model: str) -> Counter[int]:
    """Statuses of the answers."""
    statuses: Counter[int] = Counter()

    @_SAME_EACH_TIME
    @given(case=operation.as_strategy(generation_mode=mode))
    def answered(case: Case) -> None:
        for part in (case.body, case.query):  # `/ready` of another model is 503, as it has to be
            if isinstance(part, MutableMapping):
                _may_be_served(part, model)
        response = case.call(timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=[not_a_server_error])
        assert response.headers["x-request-id"]
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    answered()
    return statuses


def _may_be_served(body: MutableMapping[str, Any], model: str) -> None:
    """A generated request for our model, and short: else all would end at the model's name, or take a whole context each."""
    if isinstance(body.get("model"), str):
        body["model"] = model
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 20)
