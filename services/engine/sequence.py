"""One choice of a run inside an engine: its ids, how far its KV is computed, the blocks that hold it.

Invariant: tokens 0..computed-1 have their KV in `blocks`; the last id is never computed before the step that follows it; the
first `sealed` blocks are full and never written.
Changed on the event loop only; `cancelled` alone is read by the computing thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.job import Sampling
from schemas.reply import FinishReason
from services.engine.history import History
from services.engine.protocol import RunSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """`reused`: tokens whose KV came from this engine's prefix cache; `cached_tokens`: what the job is told of the prompt's.

    `hashes`: identities of its first blocks, as far as they are known; the first `sealed` blocks are shareable. `history` is the
    sampler's, there when penalties ask for it.
    """

    spec: RunSpec
    choice: int
    ids: list[int]
    blocks: tuple[int, ...]
    arrival: int
    then_decode: bool
    computed: int = 0
    cached_tokens: int = 0
    compute_s: float = 0.0
    cancelled: bool = False
    reused: int = 0
    sealed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    history: History | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.spec.prompt)

    @property
    def run(self) -> int:
        return self.spec.run

    @property
    def sampling(self) -> Sampling:
        return self.spec.sampling

    @property
    def generated(self) -> int:
        """How many tokens this choice has generated, in all attempts."""
        return len(self.ids) - self.prompt_length

    @property
    def drawing(self) -> tuple[int, ...]:
        """The choices whose next token is drawn from the logits of the last id."""
        return (self.choice,)

    @property
    def uncomputed(self) -> int:
        return len(self.ids) - self.computed

    @property
    def waiting(self) -> bool:
        """No step has computed anything of it yet."""
        return self.computed == self.reused

    @property
    def decoding(self) -> bool:
        """Only the last sampled token is missing: one token a step from here."""
        return self.uncomputed == 1 and self.generated > 0

    def enders(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end this choice. Before it has `min_tokens` they must not be drawn."""
        return frozenset(self.sampling.stop_token_ids) | (frozenset() if self.sampling.ignore_eos else eos_ids)

    def finish_after_last(self, eos_ids: frozenset[int], context_length: int) -> FinishReason | None:
        """Why the choice ends with the token that was just appended, or None."""
        if self.generated > self.sampling.min_tokens and self.ids[-1] in self.enders(eos_ids):
            return FinishReason.STOP
        if self.generated >= self.sampling.max_tokens or len(self.ids) >= context_length:
            return FinishReason.LENGTH
        return None
