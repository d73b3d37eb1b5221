"""What processes say of themselves: worker state, edge beats, router queue reports, deaths."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.checks import require, require_process
from schemas.codec import Message, SchemaRange
from schemas.numbers import Count, Rate, Seconds, Tokens, UnixTime


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Capabilities(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What an engine can honour. The edge refuses by name what is missing here, but `n`: several choices in one run.

    Where an engine has not that, an edge makes a job of each choice. `adapters`: LoRA adapters by name; a request names one
    behind its model's name and a colon.
    """

    seed: bool = False
    penalties: bool = False
    n: bool = False
    logprobs: bool = False
    top_k: bool = False
    min_p: bool = False
    logit_bias: bool = False
    grammar: tuple[str, ...] = ()
    exact_resume: bool = False
    cancel_during_handoff: bool = True
    must_hand_off: bool = False
    prompt_logprobs: bool = False
    adapters: tuple[str, ...] = ()


class Credits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a worker would still take. `version` only grows; the higher one is the newer one.

    `prefill_tokens`: uncached prompt tokens it would queue; `decode_slots`: sequences; `kv_blocks`: free or evictable blocks.
    """

    version: Count
    prefill_tokens: Count = 0
    decode_slots: Count = 0
    kv_blocks: Count = 0


class Rates(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Measured: prompt tokens per second of prefill, seconds of one decode step, cached tokens per second fetched from decode.

    0 = not measured; `fetch_tokens_s` 0 = this worker fetches none.
    """

    prefill_tokens_s: Rate = 0.0
    decode_step_s: Seconds = 0.0
    fetch_tokens_s: Rate = 0.0


class WorkerState(Message, frozen=True, omit_defaults=True, kw_only=True):
    """Each 250 ms, and on change debounced to 20 ms. `sent` is the sender's wall clock (Unix seconds).

    `stalled`: its engine has been in one step for max(2 s, 10 times its own p99), although the process itself is well.
    `backlog`: prompt tokens still to be computed, of runs queued and begun; `yielding`: those of them that make way for an
    enterprise prompt that comes now, `yielding_queued` of `queued` do. `host`: equal on one machine, "" = not said.
    `swapped`: runs that were preempted and wait for room, `swap_used` blocks of them; they are neither queued nor running.
    """

    process: str
    role: Role
    model: str
    kv_compat: str
    weights: str
    schemas: SchemaRange
    capabilities: Capabilities
    credits: Credits
    sent: UnixTime
    context_length: Tokens
    block_tokens: Tokens
    queued: Count = 0
    running: Count = 0
    backlog: Count = 0
    yielding: Count = 0
    yielding_queued: Count = 0
    swapped: Count = 0
    kv_used: Count = 0
    kv_total: Count = 0
    swap_used: Count = 0
    steps: Count = 0
    step_p99_s: Seconds = 0.0
    rates: Rates = Rates()
    draining: bool = False
    stalled: bool = False
    host: str = ""

    def __post_init__(self) -> None:
        require_process(self.process, "process")
        require(min(self.context_length, self.block_tokens) >= 1, "context_length or block_tokens is below 1")
        require(self.kv_total * self.block_tokens <= 2**53, "kv_total is out of range")  # its tokens are a `Count` in a card


class EdgeBeat(Message, frozen=True, omit_defaults=True, kw_only=True):
    """An edge's sign of life, every 500 ms. `sent` is its wall clock (Unix seconds).

    `writes`: the schema version it writes, which everybody it hears can read. Workers hear nobody else.
    """

    process: str
    sent: UnixTime
    schemas: SchemaRange = SchemaRange()
    writes: Count = 1
    left: bool = False

    def __post_init__(self) -> None:
        require_process(self.process, "process")


class ModelCard(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a router knows of a model from its live workers. `kv_tokens`: what the largest KV pool holds; 0 = not said."""

    model: str
    capabilities: Capabilities
    context_length: Tokens
    kv_tokens: Count = 0
    weights: tuple[str, ...] = ()
    schemas: SchemaRange = SchemaRange()

    def __post_init__(self) -> None:
        require(self.context_length >= 1, "context_length is below 1")


class QueueReport(Message, frozen=True, omit_defaults=True, kw_only=True):
    """A router's word on one model, every 100 ms, also when nothing waits. `waiting`: jobs by tier; `drain_rate`: jobs/s.

    `card` comes once a second. `schemas`: what the router itself reads.
    """

    router: str
    model: str
    waiting: dict[str, Count] = {}
    drain_rate: Rate = 0.0
    schemas: SchemaRange = SchemaRange()
    card: ModelCard | None = None


class Cause(StrEnum):
    KILLED = "killed"
    REPLACED = "replaced"
    LEFT = "left"
    DISCONNECTED = "disconnected"

    @property
    def proven(self) -> bool:
        """Proven death: counts against a job, and is acted on at once."""
        return self in (Cause.KILLED, Cause.REPLACED)


class Death(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`hr.dead.<id>`, sent 3 times 100 ms apart."""

    process: str
    cause: Cause
