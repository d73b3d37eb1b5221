"""The token that prefill sampled, as decode repeats it to the edge: so that decode's stream alone is complete."""

from __future__ import annotations

from schemas.handoff import FirstToken, Handoff
from services.engine.protocol import TokenOutput


def output(run: int, token: FirstToken, handoff: Handoff) -> TokenOutput:
    return TokenOutput(
        run=run,
        choice=token.choice,
        index=token.index,
        token=token.token,
        logprob=token.logprob,
        finish=token.finish,
        cached_tokens=handoff.cached_tokens,
        compute_s=handoff.compute_s,
    )
