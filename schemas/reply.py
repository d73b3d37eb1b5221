"""What workers and routers say on an edge's reply subject: frames of token ids, events, digests. Never text.

One NATS message carries the records of one engine step that share a `reply_to`; its NATS reply subject is the sender's
control subject. A frame's index *is* its sequence number.

Owners keep the records of each run for a while, hundreds of thousands together: so the garbage collector does not track them
(`gc=False`), which is right as long as nothing in them can refer back to them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.codec import Message
from schemas.lifecycle import State
from schemas.numbers import ChoiceIndex, Count, Hop, Random64, Real, Seconds, Token, Tokens


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Log-probability (natural) of one token and, when asked for, of the most likely ones as (id, logprob).

    `rank`: of a prompt's token, its place among all tokens in order of likelihood, 1 = the most likely; 0 = not said.
    """

    token: Token
    logprob: Real
    top: tuple[tuple[Token, Real], ...] = ()
    rank: Count = 0


PROMPT = -1
"""The `choice` of a frame that says how likely the prompt's own tokens are: then `index` counts from the prompt's begin, and is
at least 1, because the first token has nothing before it."""


class Frame(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Tokens `index`, `index`+1, … of one choice, or of the prompt. `cached_tokens` and `compute_s` are of this attempt so far.

    `logprobs`: none, or one a token. Those of the prompt come before the first token of any choice.
    """

    run: Random64
    job: str
    attempt: Count
    hop: Hop
    index: Count
    choice: ChoiceIndex = 0
    tokens: tuple[Token, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: Tokens = 0
    compute_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.index < 0 or self.choice < PROMPT:
            raise ValueError("index or choice is out of range")
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError("there is not one logprob a token")
        if self.choice == PROMPT and (self.index < 1 or not self.logprobs):
            raise ValueError("a frame of the prompt has no logprobs")


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """A change of an attempt's state. `owned` is an event (`reason="owned"`); every attempt ends with a terminal one."""

    run: Random64
    job: str
    attempt: Count
    hop: Hop
    state: State
    reason: str = ""
    error_code: str = ""
    retry_after: Seconds | None = None
    weights: str = ""


OWNED = "owned"
BY_OPERATOR = "operator"
"""Reason of a CANCELLED that nobody resumes: the client is told."""


def by_operator(job: str) -> Event:
    """An operator ended `job`, whatever its attempt and run."""
    return Event(run=0, job=job, attempt=0, hop=0, state=State.CANCELLED, reason=BY_OPERATOR)


class Frames(Message, frozen=True, omit_defaults=True, kw_only=True, tag="frames"):
    """The records of one step; within a job, frames come before the event that follows them."""

    process: str
    frames: tuple[Frame, ...] = ()
    events: tuple[Event, ...] = ()


class DigestEntry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """Where a run stands: `last` holds (choice, index of its last token).

    By `attempt` and `hop` an edge that never heard *owned* of this run adopts or refuses it.
    """

    run: Random64
    job: str
    attempt: Count
    hop: Hop
    state: State
    last: tuple[tuple[ChoiceIndex, Count], ...] = ()


class Digest(Message, frozen=True, omit_defaults=True, kw_only=True, tag="digest"):
    """Every 250 ms, each worker to each edge it serves: its runs, ended ones for 10 s.

    `stalled`: the engine stands still (`WorkerState`), so runs that compute say nothing new, whatever their state. `continued`:
    more of the digest before, which was too large for one message.
    """

    process: str
    runs: tuple[DigestEntry, ...] = ()
    stalled: bool = False
    continued: bool = False


Reply = Frames | Digest
