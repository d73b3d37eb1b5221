"""What placement must know of a job, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.job import Job, Tier

PATIENCE_S = 1.0
"""How long after its submit a job may be kept for a better worker than those with credit; longer than most prompts take."""


@dataclass(frozen=True, slots=True)
class Request:
    """`tokens`: prompt and what earlier attempts generated. `weights`: "" = any.

    `suspect`: it may kill its worker, so all such jobs of a pool go to one worker, one after another. `branches`: of several open
    choices, how much each has generated; `tokens` counts the longest. `hits`: by process, how many leading blocks of the prompt
    lie in its prefix cache. `patience`: seconds that it may still wait for a better worker than those with credit. `urgent`:
    workers compute it before others that did not come long ago. `to_come`: how many tokens it may still generate, all choices
    together.
    """

    tokens: int
    weights: str = ""
    suspect: bool = False
    branches: tuple[int, ...] = ()
    hits: Mapping[str, int] = field(default_factory=dict)
    patience: float = 0.0
    urgent: bool = False
    to_come: int = field(default=0, compare=False)

    @classmethod
    def of(cls, job: Job, hits: Mapping[str, int] | None = None, patience: float = 0.0) -> Request:
        generated = tuple(len(choice.generated) for choice in job.open_choices)
        branches = generated if len(generated) > 1 else ()
        urgent, to_come = job.tier is Tier.ENTERPRISE, sum(job.sampling.max_tokens - each for each in generated)
        tokens = job.prompt_tokens + max(generated)
        return cls(tokens, job.weights, job.suspect, branches, hits or {}, patience, urgent, to_come)

    def blocks(self, block_tokens: int) -> int:
        """KV blocks that its tokens fill."""
        return -(-self.tokens // block_tokens)

    def room(self, block_tokens: int, *, to_end: bool = False) -> int:
        """Blocks to reserve: the prompt's, once, and for each choice what it has generated and one to write next.

        `to_end`: all that it may ever need, for engines that begin only what they can end.
        """
        if to_end:
            return -(-(self.tokens + self.to_come) // block_tokens)
        if not self.branches:
            return self.blocks(block_tokens) + 1
        prompt = self.tokens - max(self.branches)
        return -(-prompt // block_tokens) + sum(-(-generated // block_tokens) + 1 for generated in self.branches)

    def uncached(self, process: str, block_tokens: int) -> int:
        """Tokens that `process` would have to compute: at least the last one, for its logits."""
        hit = self.hits.get(process, 0)
        return self.tokens - min(hit, (self.tokens - 1) // block_tokens) * block_tokens if hit else self.tokens
