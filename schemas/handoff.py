"""Prefill to decode: where the KV blocks of a run lie, and what decode needs to go on."""

from __future__ import annotations

import msgspec

from schemas.checks import require, require_process
from schemas.codec import Message
from schemas.job import Job
from schemas.kvevents import BlockHash
from schemas.numbers import ChoiceIndex, Count, Random64, Seconds, Token, Tokens
from schemas.reply import FinishReason, Logprob


class BlockRef(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One block of the sender: its slot, its generation, the identity of a full block (empty for the tail)."""

    slot: Count
    generation: Count
    hash: bytes = b""


class Ticket(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Leave to fetch once: `address` is host:port, `expires_s` counts from the moment of sending.

    `local`: the same, as the name of a socket on the sender's host, where its memory can be mapped; `nixl`: its memory can be
    read through NIXL. A reader that can use neither uses the address.
    """

    address: str
    token: bytes
    expires_s: Seconds
    local: str = ""
    nixl: bool = False


class FirstToken(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The token prefill sampled for one open choice; `index` is its position among the choice's generated tokens.

    With a `finish` it ended its choice: decode repeats it to the edge and goes on with the others.
    """

    choice: ChoiceIndex
    index: Count
    token: Token
    logprob: Logprob | None = None
    finish: FinishReason | None = None


class Handoff(Message, frozen=True, omit_defaults=True, kw_only=True):
    """Prefill to `hr.decode.<id>.handoff`. `tail_tokens`: filled tokens of the last block (0 = it is full).

    `blocks` hold the prompt, once; and what the choice has generated, if one alone is open. Of several open choices, decode
    computes what earlier attempts generated, and `first` has only those that begin.
    `compute_s` and `cached_tokens` are prefill's, so that decode's frames report the attempt's totals.
    `opaque` replaces blocks and ticket for engines that move KV themselves.
    """

    run: Random64
    job: Job
    prefill: str
    first: tuple[FirstToken, ...]
    kv_compat: str
    blocks: tuple[BlockRef, ...] = ()
    tail_tokens: Tokens = 0
    ticket: Ticket | None = None
    cached_tokens: Tokens = 0
    compute_s: Seconds = 0.0
    opaque: bytes = b""

    def __post_init__(self) -> None:
        require_process(self.prefill, "prefill")


class OfferRequest(Message, frozen=True, omit_defaults=True, kw_only=True):
    """What a prefill worker would fetch from decode's prefix cache (`hr.decode.<id>.offer`): a prompt's full blocks from the
    first on, of which it has the first `have` itself."""

    run: Random64
    kv_compat: str
    hashes: tuple[BlockHash, ...]
    have: Count = 0

    def __post_init__(self) -> None:
        require(0 <= self.have <= len(self.hashes), "have is outside the hashes")


class Offer(Message, frozen=True, omit_defaults=True, kw_only=True):
    """What decode lends of them: the longest beginning that it has, with what the asker has too. Without a ticket: nothing, and
    why."""

    run: Random64
    blocks: tuple[BlockRef, ...] = ()
    ticket: Ticket | None = None
    reason: str = ""
