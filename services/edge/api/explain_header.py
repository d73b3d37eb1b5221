"""Header `x-headrace-explain`: asked for with `1`, answered with JSON that says where the request went, and why.

Knows nothing of who may see what (`services.edge.jobs.explained`). Invariant: the answer is ASCII and no longer than
`MOST_BYTES`, so that no proxy refuses a response because of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from schemas.explanation import Candidate, Explanation

NAME = b"x-headrace-explain"
MOST_BYTES = 2048
_LONGEST_REASON = 200


def asked(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(NAME, b"").strip().lower() in (b"1", b"true")


def value(explanation: Explanation) -> bytes:
    """Workers are left out until it is short enough."""
    shown = replace(explanation, reason=explanation.reason[:_LONGEST_REASON])
    while len(_encode(shown)) > MOST_BYTES and (shown.candidates or shown.passed_over):
        shown = _shorter(shown)
    return _encode(shown)


def _shorter(shown: Explanation) -> Explanation:
    """The first half of each list: the better one of the candidates of each kind."""
    kinds: dict[str, list[Candidate]] = {}
    for one in shown.candidates:
        kinds.setdefault(one.does, []).append(one)
    candidates = tuple(one for kind in kinds.values() for one in kind[: len(kind) // 2])
    passed_over = shown.passed_over[: len(shown.passed_over) // 2]
    gone = len(shown.candidates) + len(shown.passed_over) - len(candidates) - len(passed_over)
    return replace(shown, candidates=candidates, passed_over=passed_over, left_out=shown.left_out + gone)


def _encode(shown: Explanation) -> bytes:
    return json.dumps(msgspec.to_builtins(shown), separators=(",", ":")).encode("ascii")
