"""One request in TensorRT-LLM, and how its output is read.

Knows no books and no reports. Invariants: the engine's token list is copied before its next step, since it grows in place; a
generation request is never aborted before its first chunk, because only then its transfer is over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from schemas.reply import FinishReason
from services.engine.protocol import RunEnd, RunSpec, RunTotals, TokenOutput
from services.engine.trtllm_engine.api import Result

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Kind(Enum):
    CONTEXT = auto()
    """Computes a prompt and leaves a handoff."""
    GENERATION = auto()
    """Consumes a handoff."""
    WHOLE = auto()
    """Both phases here, no handoff."""


@dataclass(slots=True, eq=False)
class Leg:
    """`repeats`: tokens that its stream begins with and that were reported before. `totals`: of the run so far.

    `ending`: how a run that is being dropped ends, since `dropped_at`. `given_up_at`: its end was reported although the engine
    has not said it. Times are monotonic seconds.
    """

    spec: RunSpec
    kind: Kind
    result: Result
    began: float
    totals: RunTotals = field(default_factory=RunTotals)
    repeats: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    seen: float = 0.0
    started: bool = False
    finished: bool = False
    ending: RunEnd | None = None
    dropped_at: float = 0.0
    given_up_at: float | None = None

    def __post_init__(self) -> None:
        self.seen = self.began

    @property
    def committing(self) -> bool:
        """Its handoff is being consumed, which nothing may interrupt."""
        return self.kind is Kind.GENERATION and not self.started

    @property
    def uncomputed(self) -> int:
        """Prompt tokens that may still have to be computed."""
        return 0 if self.started or self.kind is Kind.GENERATION else len(self.spec.trunk)

    @property
    def choice(self) -> int:
        return self.spec.choices[0].index

    @property
    def wanted(self) -> bool:
        """Somebody waits for its tokens."""
        return self.ending is None and self.given_up_at is None and not self.finished

    def drop(self, ending: RunEnd, now: float) -> None:
        """The run is wanted no more."""
        if self.ending is None:
            self.ending, self.dropped_at = ending, now
            if not self.committing:
                self.result.abort()

    def give_up(self, now: float) -> None:
        """The engine does not bring it to an end."""
        self.given_up_at = now
        if not self.committing:
            self.result.abort()

    def first_chunk(self) -> None:
        """Something came: a transfer is over, and an abort that waited for it can be said."""
        waited, self.started = self.committing, True
        if waited and (self.ending is not None or self.given_up_at is not None):
            self.result.abort()

    def take(self, completion: Any, eos: int) -> list[int]:
        """The tokens that are new in this chunk. A stop token that the engine strips from its list is put back: some token has
        to carry the finish, and what was reported before cannot."""
        now = list(completion.token_ids)
        new = now[len(self.tokens) :]
        if completion.finish_reason == "stop" and len(now) <= max(len(self.tokens), len(self.repeats)):
            new += [completion.stop_reason if isinstance(completion.stop_reason, int) else eos]
        self.tokens += new
        return new

    def outputs(self, new: list[int], finish: FinishReason | None) -> tuple[TokenOutput, ...]:
        """`new`, the end of `tokens`, as reports; without what was reported before. The last one carries `finish`."""
        begin = len(self.tokens) - len(new)
        generated = len(self.spec.choices[0].generated)
        fresh = range(max(begin, len(self.repeats)), len(self.tokens))
        return tuple(
            TokenOutput(
                run=self.spec.run,
                choice=self.choice,
                index=generated + position,
                token=self.tokens[position],
                finish=finish if position == len(self.tokens) - 1 else None,
                cached_tokens=self.totals.cached_tokens,
                compute_s=self.totals.compute_s,
            )
            for position in fresh
        )

    def agrees(self) -> bool:
        """Its stream begins with the tokens that were reported before."""
        return all(here == there for here, there in zip(self.tokens, self.repeats, strict=False))


def finish_of(completion: Any) -> FinishReason | None:
    """None while it goes on, and for ends that are no finish (a cancel, a handoff)."""
    return _FINISHES.get(completion.finish_reason)


def to_come(spec: RunSpec) -> int:
    """How many tokens its choice may still generate."""
    return spec.sampling.max_tokens - len(spec.choices[0].generated)
