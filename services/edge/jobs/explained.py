"""How much of a router's explanation a caller may see, and that much of it. Pure.

Invariant: who showed a key, and may be one tenant of many, learns nothing of others' load: of workers the ids of those that were
chosen, of the prediction what is its own (tokens that are cached for it there, tokens to compute).
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
    """Of the candidates those that were chosen: who is missing among all has no credit, and their order is that of costs."""
    candidates = [replace(one, cost=None) for one in said.candidates if one.process in (said.prefill, said.decode)]
    why = None if said.why is None else Terms(uncached=said.why.uncached)
    return replace(said, why=why, candidates=tuple(candidates), passed_over=(), left_out=0)
