"""The token that prefill sampled, as it goes to decode."""

from __future__ import annotations

from schemas.handoff import FirstToken
from services.engine.protocol import TokenOutput


def first_token(output: TokenOutput) -> FirstToken:
    return FirstToken(choice=output.choice, index=output.index, token=output.token, logprob=output.logprob, finish=output.finish)
