"""Can a step compute this run? Asked once, when it arrives: one bad row would fail every row of its step."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from schemas.handoff import FirstToken
from services.engine.protocol import EngineInfo, RunSpec


def admit(info: EngineInfo, spec: RunSpec, first: Sequence[FirstToken] = ()) -> None:
    """Raises `UnsupportedParameter` for several choices where the engine computes one, or a grammar of a kind it cannot keep to,
    `ContextLengthExceeded` when no token more of a choice fits the context, `InvalidRequest` for an id outside the vocabulary, a
    biased or a stopping one too.
    """
    if len(spec.choices) != 1 and not info.capabilities.n:
        raise UnsupportedParameter(f"{info.name} computes one choice a run", param="n")
    grammar = spec.sampling.grammar
    if grammar is not None and grammar.kind not in info.capabilities.grammar:
        raise UnsupportedParameter(f"{info.name} cannot keep to this kind of grammar", param="response_format")
    drawn = {token.choice for token in first}
    longest = len(spec.prompt) + max(len(choice.generated) + (choice.index in drawn) for choice in spec.choices)
    if longest >= info.context_length:
        raise ContextLengthExceeded(f"{longest} tokens leave no room in a context of {info.context_length}")
    generated = (token for choice in spec.choices for token in choice.generated)
    steered = (*spec.sampling.logit_bias, *spec.sampling.stop_token_ids)
    named = (*spec.prompt, *generated, *(token.token for token in first), *steered)
    if not 0 <= min(named) <= max(named) < info.vocab_size:
        raise InvalidRequest(f"a token id is outside 0..{info.vocab_size - 1}")
