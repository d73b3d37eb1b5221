"""One choice of a run inside an engine: its ids, how far its KV is computed, the blocks that hold it.

Of a run with several open choices the prompt comes first, as a sequence of its own (a trunk), until it branches into one sequence
a choice.

Invariant: tokens 0..computed-1 have their KV in `blocks`, or all of them in the swap space; the last id is never computed before
the step that follows it; the first `sealed` blocks are full and never written.
Changed on the event loop only; `cancelled` alone is read by the computing thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from schemas.handoff import FirstToken
from schemas.job import Sampling
from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.engine.constraint import Constraint
from services.engine.drafts import FIRST_LIMIT
from services.engine.history import History
from services.engine.protocol import RunSpec, RunTotals
from services.kv.holders import ChoiceHolder, Holder, RunHolder
from services.text.grammar import BadGrammar
from services.text.grammar_cache import Compiled

TRUNK = -1
"""The `choice` of a sequence that is the beginning of several."""


@dataclass(slots=True, eq=False)
class Sequence:
    """`reused`: tokens whose KV came from this engine's prefix cache; `totals`: its run's, shared by all its sequences.

    `hashes`: identities of its first blocks, as far as they are known; the first `sealed` blocks are shareable. `history` is the
    sampler's, there when penalties ask for it. `dropped`: choices that nobody wants any more; `ending`: what its run ends as, if
    it is cancelled and was the last. `grammar` may still be compiling; `constraint`, the sampler's too, is the place in it.
    `draft_limit`: how many tokens to guess next time, at most.
    `swapped_at`: since when (monotonic seconds) its KV is in the swap space, and it computes nothing; `returned_at`: how much was
    computed when it last came back. `arrival`: its place in the order of arrival; `came_at`: when that was (monotonic seconds).
    """

    spec: RunSpec
    choice: int
    ids: list[int]
    blocks: tuple[int, ...]
    arrival: int
    then_decode: bool
    computed: int = 0
    totals: RunTotals = field(default_factory=RunTotals)
    cancelled: bool = False
    reused: int = 0
    sealed: int = 0
    hashes: list[bytes] = field(default_factory=list)
    history: History | None = None
    grammar: asyncio.Future[Compiled] | None = None
    constraint: Constraint | None = None
    draft_limit: int = FIRST_LIMIT
    dropped: set[int] = field(default_factory=set)
    ending: State = State.CANCELLED
    swapped_at: float | None = None
    returned_at: int | None = None
    came_at: float = 0.0
    holder: Holder = field(init=False)
    prompt_length: int = field(init=False)
    _enders: frozenset[int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.spec.prompt)
        self.holder = ChoiceHolder(self.run, self.choice) if self.branched else RunHolder(self.run)

    @classmethod
    def begin(cls, spec: RunSpec, arrival: int, then_decode: bool, came_at: float) -> Sequence:
        """The run's only choice, or the trunk of its choices."""
        choice = TRUNK if len(spec.choices) > 1 else spec.choices[0].index
        return cls(spec, choice, list(spec.trunk), (), arrival, then_decode, came_at=came_at)

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
        if self.choice != TRUNK:
            return (self.choice,)
        return tuple(choice.index for choice in self.spec.choices if not choice.generated)

    @property
    def uncomputed(self) -> int:
        return len(self.ids) - self.computed

    @property
    def computable(self) -> int:
        """How much of that may be computed now: while the grammar compiles, all but what a token would be drawn from."""
        compiling = self.grammar is not None and not self.grammar.done()
        return len(self.ids) - self.computed - compiling

    @property
    def scoring(self) -> bool:
        """What is computed next says how likely the prompt's own tokens are."""
        return self.sampling.prompt_logprobs is not None and self.computed < self.prompt_length - 1

    @property
    def refusal(self) -> str:
        """Why its grammar cannot be used; "" when it can, or when nobody knows yet."""
        if self.grammar is None or not self.grammar.done():
            return ""
        compiled = self.grammar.result()
        return compiled.reason if isinstance(compiled, BadGrammar) else ""

    @property
    def waiting(self) -> bool:
        """No step has computed anything of it yet."""
        return self.computed == self.reused

    @property
    def decoding(self) -> bool:
        """Only the last sampled token is missing: one token a step from here."""
        count = len(self.ids)
        return count - self.computed == 1 and count > self.prompt_length

    def enders(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end this choice. Before it has `min_tokens` they must not be drawn."""
        if self._enders is None:
            self._enders = frozenset(self.sampling.stop_token_ids) | (frozenset() if self.sampling.ignore_eos else eos_ids)
        return self._enders

    def finish_after_last(self, eos_ids: frozenset[int], context_length: int) -> FinishReason | None:
        """Why the choice ends with the token that was just appended, or None."""
        sampling, generated = self.spec.sampling, len(self.ids) - self.prompt_length
        if self.ids[-1] in self.enders(eos_ids) and generated > sampling.min_tokens:
            return FinishReason.STOP
        if generated >= sampling.max_tokens or len(self.ids) >= context_length:
            return FinishReason.LENGTH
        return None

    # several choices

    @property
    def branched(self) -> bool:
        """One of several choices, which may share its blocks with the others."""
        return self.choice != TRUNK and len(self.spec.choices) > 1

    @property
    def branching(self) -> bool:
        """A trunk whose ids are all computed: its choices go on by themselves."""
        return self.choice == TRUNK and self.uncomputed == 0

    def branches(self) -> list[Sequence]:
        """One sequence for each choice that is still wanted; they have no blocks yet."""
        return [
            Sequence(
                self.spec,
                choice.index,
                [*self.ids, *choice.generated],
                (),
                self.arrival,
                self.then_decode,
                self.computed,
                self.totals,
                grammar=self.grammar,
                came_at=self.came_at,
            )
            for choice in self.spec.choices
            if choice.index not in self.dropped
        ]

    def with_first(self, first: Iterable[FirstToken]) -> list[Sequence]:
        """What goes on from here with the tokens that were drawn elsewhere; not what ended with them, nor what did not begin."""
        tokens = {token.choice: token for token in first}
        going = self.branches() if self.branching else [self]
        for sequence in going:
            if sequence.choice in tokens:
                sequence.ids.append(tokens[sequence.choice].token)
        return [s for s in going if s.uncomputed and (s.choice not in tokens or tokens[s.choice].finish is None)]

    def drop(self, choices: Container[int] | None) -> bool:
        """These choices (None: all) are wanted no more. True when that leaves nothing of this sequence: it is cancelled.

        A choice that its edge has enough of is finished; only a whole run ends as cancelled.
        """
        self.ending = State.CANCELLED if choices is None else State.FINISHED
        mine = [choice.index for choice in self.spec.choices] if self.choice == TRUNK else [self.choice]
        self.dropped.update(choice for choice in mine if choices is None or choice in choices)
        self.cancelled = self.cancelled or self.dropped.issuperset(mine)
        return self.cancelled
