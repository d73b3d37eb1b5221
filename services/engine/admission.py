"""Can a step compute this run? Asked once, when it arrives: one bad row would fail every row of its step."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from schemas.handoff import FirstToken
from schemas.job import Choice
from services.engine.protocol import EngineInfo, RunSpec


def admit(info: EngineInfo, spec: RunSpec, first: Sequence[FirstToken] = ()) -> tuple[Choice, list[int]]:
    """The run's one open choice and all its ids, `first` included.

    Raises `UnsupportedParameter` for more choices, `ContextLengthExceeded` when no token more fits the context,
    `InvalidRequest` for an id outside the vocabulary, a biased one too.
    """
    if len(spec.choices) != 1:
        raise UnsupportedParameter(f"{info.name} computes one choice a run", param="n")
    choice = spec.choices[0]
    ids = [*spec.prompt, *choice.generated, *(token.token for token in first)]
    if len(ids) >= info.context_length:
        raise ContextLengthExceeded(f"{len(ids)} tokens leave no room in a context of {info.context_length}")
    named = (*ids, *spec.sampling.logit_bias)
    if not 0 <= min(named) <= max(named) < info.vocab_size:
        raise InvalidRequest(f"a token id is outside 0..{info.vocab_size - 1}")
    return choice, ids
