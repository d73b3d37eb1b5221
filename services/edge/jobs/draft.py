"""What the HTTP layer asks for: a job without its identity, attempt and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from schemas.job import Sampling, Tier
from schemas.reply import FinishReason, Logprob
from services.edge.jobs.explained import Explain


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds from the start of the job."""

    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Draft:
    """`prompt` is token ids, u32 little-endian; `lane` and `salt` are the tenant's. `explain`: what its caller is told of why.
    `elsewhere`: another model answers if this one has no worker, so none is waited for. `adapter`: a LoRA adapter's name."""

    model: str
    prompt: bytes
    sampling: Sampling
    limits: Limits
    lane: int
    salt: bytes
    tier: Tier = Tier.PAID
    n: int = 1
    explain: Explain = Explain.NOTHING
    elsewhere: bool = False
    adapter: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class Delta(msgspec.Struct, frozen=True):
    """What one choice got since the last look. `finish` is set with its last tokens (there may be none).

    `logprobs`: one a token when the job asked for them.
    One a token is made: a Struct, because a dataclass takes ten times as long.
    """

    choice: int
    tokens: list[int]
    finish: FinishReason | None = None
    logprobs: Sequence[Logprob] = ()

    def one_by_one(self) -> list[Delta]:
        """The same, each token on its own, and at last the finish: what does not depend on how tokens were bundled."""
        if len(self.tokens) == 1 and self.finish is None:
            return [self]
        each = [Delta(self.choice, [token], None, self.logprobs[at : at + 1]) for at, token in enumerate(self.tokens)]
        return each if self.finish is None else [*each, Delta(self.choice, [], self.finish)]
