"""A Job: what the edge asks for, whole. The same message goes to routers, the queue and, in a Placement, to workers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from schemas.checks import is_subject, require, require_process
from schemas.codec import Message
from schemas.identity import is_job
from schemas.numbers import ChoiceIndex, Count, Span, Token, UnixTime

LANES = 16
SUSPECT = 2
"""Proven deaths of its owners after which a job computes alone."""
U64 = 2**64
U32 = 2**32
MAX_CHOICES = 128
MAX_LOGPROBS = 20
"""OpenAI's limits, at which no engine has to wonder."""


class Tier(StrEnum):
    ENTERPRISE = "enterprise"
    PAID = "paid"
    FREE = "free"


class Deadlines(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Limits in seconds after `stamp`, the sender's wall clock (Unix seconds). None = no such limit."""

    stamp: UnixTime
    total: Span
    queue: Span | None = None
    first_token: Span | None = None


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """Constrained output: `kind` is json_object, json_schema, regex or grammar."""

    kind: str
    source: str = ""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How tokens are drawn. Token i of choice c depends on (seed, c, i, logits) only.

    `max_tokens` counts generated tokens of a choice, those of earlier attempts included. `top_k` 0 and `min_p` 0 mean off.
    `logprobs` is the number of alternatives, None = none.
    """

    seed: int
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Token, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        require(0 <= self.seed < U64, "seed is outside 0..2**64-1")
        require(1 <= self.max_tokens < U32 and 0 <= self.min_tokens < U32, "max_tokens or min_tokens is out of range")
        require(0.0 <= self.temperature <= 2.0 and 0.0 < self.top_p <= 1.0, "temperature or top_p is out of range")  # NaN fails
        require(0 <= self.top_k < U32 and 0.0 <= self.min_p <= 1.0, "top_k or min_p is out of range")
        require(abs(self.presence_penalty) <= 2.0 and abs(self.frequency_penalty) <= 2.0, "a penalty is out of range")
        require(0.01 <= self.repetition_penalty <= 10.0, "repetition_penalty is out of range")
        if self.logit_bias:
            require(all(abs(bias) <= 100.0 for bias in self.logit_bias.values()), "a logit_bias is outside -100..100")
        if self.stop_token_ids:
            require(all(0 <= token < U32 for token in self.stop_token_ids), "a stop token is no token id")
        for count in (self.logprobs, self.prompt_logprobs):
            require(count is None or 0 <= count <= MAX_LOGPROBS, "logprobs or prompt_logprobs are out of range")

    @property
    def penalises(self) -> bool:
        """Whether the ids before a token change its logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Choice(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One of a job's n answers: the ids generated so far, kept apart from the prompt."""

    index: ChoiceIndex
    generated: tuple[Token, ...] = ()
    done: bool = False


class Job(Message, frozen=True, omit_defaults=True, kw_only=True):
    """See design section 3. `prompt` is u32 little-endian; `lane` is the keyed hash of the tenant mod 16; `salt` keys the
    tenant's prefix cache; `deaths` counts proven deaths of processes that owned this job; `weights` is set on a resume.
    `explain`: its caller wants to know why it is placed as it is."""

    job: str
    attempt: Count
    model: str
    prompt: bytes
    sampling: Sampling
    deadlines: Deadlines
    reply_to: str
    edge: str
    n: int = 1
    choices: tuple[Choice, ...] = (Choice(index=0),)
    tier: Tier = Tier.PAID
    lane: int = 0
    salt: bytes = b""
    adapter: str | None = None
    detached: bool = False
    resume: bool = False
    deaths: Count = 0
    weights: str = ""
    explain: bool = False
    trace: dict[str, str] = {}

    def __post_init__(self) -> None:
        require(is_job(self.job), "job is not 128 bits of hex")
        require_process(self.edge, "edge")
        require(is_subject(self.reply_to), "reply_to is not a subject")
        require(bool(self.prompt) and len(self.prompt) % 4 == 0, "prompt is empty or not whole u32 ids")
        require(len(self.salt) <= 64, "salt is longer than 64 bytes")  # BLAKE2b takes no longer key
        require(self.attempt >= 1 and self.deaths >= 0 and 0 <= self.lane < LANES, "attempt, deaths or lane is out of range")
        require(1 <= self.n <= MAX_CHOICES, f"n is outside 1..{MAX_CHOICES}")
        require([choice.index for choice in self.choices] == list(range(self.n)), "choices are not 0..n-1")
        require(bool(self.open_choices), "every choice is done")

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def suspect(self) -> bool:
        """It may be what killed the processes that owned it."""
        return self.deaths >= SUSPECT

    @property
    def open_choices(self) -> tuple[Choice, ...]:
        return tuple(choice for choice in self.choices if not choice.done)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian bytes. Raises OverflowError for an id outside u32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError when `data` is not whole u32 values."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
