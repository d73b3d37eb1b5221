"""What a caller is told of the choice, and who was passed over: headers of every answer, also of a refusal.

Of a refusal after several tries also why its router refused: there is no exchange yet that could tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from schemas.explanation import Explanation
from services.edge.api import explain_header
from services.edge.selection.policy import Plan

MODEL = "x-headrace-model"
REASON = "x-headrace-model-reason"
FALLBACK = "x-headrace-fallback"
Passed = Sequence[tuple[str, str]]


def headers(plan: Plan, model: str, passed: Passed, explained: Explanation | None = None) -> dict[str, str]:
    """`model` answers, or its refusal does; `passed`: who would have been before it, and why they were not. `explained`: the
    refusal, when its caller asked for that. Plain ASCII."""
    told = {MODEL: _spelled(model), REASON: plan.via}
    if plan.adapter is not None:
        told[REASON] += f"; adapter={_spelled(plan.adapter)}"
    if plan.size is not None:
        told[REASON] += f"; size={plan.size}; rule={plan.rule}"
    if passed:
        told[FALLBACK] = ", ".join(f"{_spelled(name)}; reason={reason}" for name, reason in passed)
    if explained is not None:
        told[explain_header.NAME.decode()] = explain_header.value(explained).decode()
    return told


def _spelled(name: str) -> str:
    """A folder may be called anything; a header may not."""
    return quote(name, safe="/:@+")
