"""How much of a router's explanation a caller may see, and that much of it. Pure.

Invariant: who showed a key, and may be one tenant of many, learns nothing of others' load: of workers their ids, of the
prediction what is its own (tokens that are cached for it, tokens to compute).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec.structs import replace

from schemas.explanation import Explanation, Terms


class Explain(StrEnum):
    """What a caller that asks is told."""

    NOTHING = ""
    WORKERS = "workers"
    ALL = "all"


def told(explanation: Explanation | None, most: Explain) -> Explanation | None:
    """What of `explanation` its caller is told."""
    if most is Explain.NOTHING or explanation is None:
        return None
    return explanation if most is Explain.ALL else _without_load(explanation)


def _without_load(said: Explanation) -> Explanation:
    """In the order of names: the order of costs would tell who is busy, as a list of those without credit would."""
    candidates = sorted((replace(one, cost=None) for one in said.candidates), key=lambda one: (one.process, one.does))
    why = None if said.why is None else Terms(uncached=said.why.uncached)
    return replace(said, why=why, candidates=tuple(candidates), passed_over=(), left_out=0)
