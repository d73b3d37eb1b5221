"""What a worker may ask of an engine, one protocol a phase; knows no bus, no edge and no HTTP.

Everything here is called on the event loop of the worker. An engine computes elsewhere (a thread, a process) and says what
came of each step through one callback, `on_step`, on the same loop. A run's KV blocks are held in the worker's `BlockPool` by
`RunHolder(run)` from admission until the engine reports the run's end, or until prefill reports it ready for handoff; while
several choices decode, each holds its own by `ChoiceHolder(run, choice)`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from schemas.errors import InternalError
from schemas.handoff import FirstToken
from schemas.job import Choice, Job, Sampling, Tier, unpack_ids
from schemas.lifecycle import State
from schemas.reply import FinishReason, Logprob
from schemas.state import Capabilities, Rates
from services.kv.hashing import block_hashes, chain_root
from services.kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. `step_tokens`: the most prompt tokens of one step; `max_batch`: the most sequences it decodes."""

    name: str
    version: str
    model: str
    weights: str
    kv_compat: str
    capabilities: Capabilities
    context_length: int
    vocab_size: int
    block_tokens: int
    eos_ids: frozenset[int]
    step_tokens: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run as an engine sees it: ids, how to sample, who comes first when memory runs out."""

    run: int
    prompt: tuple[int, ...]
    choices: tuple[Choice, ...]
    sampling: Sampling
    tier: Tier = Tier.PAID
    salt: bytes = b""
    adapter: str | None = None

    @property
    def trunk(self) -> tuple[int, ...]:
        """What all open choices begin with, computed once: the prompt; for one alone also what it has generated."""
        return self.prompt if len(self.choices) > 1 else (*self.prompt, *self.choices[0].generated)

    def hashes(self, info: EngineInfo) -> list[bytes]:
        """Identities of the full blocks of `trunk`; 5 µs a block."""
        return block_hashes(self.trunk, info.block_tokens, chain_root(info.kv_compat, self.salt, self.adapter))

    @classmethod
    def of(cls, run: int, job: Job) -> RunSpec:
        return cls(
            run=run,
            prompt=tuple(unpack_ids(job.prompt)),
            choices=job.open_choices,
            sampling=job.sampling,
            tier=job.tier,
            salt=job.salt,
            adapter=job.adapter,
        )


@dataclass(slots=True)
class RunTotals:
    """Of one run here and, after a handoff, before it: prompt tokens that were cached, seconds of compute.

    `opaque`: what the other engine needs of this one, when engines move KV themselves; then the run left this one with its
    report, and whoever got it must see that it is consumed.
    """

    cached_tokens: int = 0
    compute_s: float = 0.0
    opaque: bytes = b""


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """One sampled token; `index` counts the choice's generated tokens from 0. `compute_s` is the run's total so far.

    A struct, not a dataclass: one is made for each token.
    """

    run: int
    choice: int
    index: int
    token: int
    logprob: Logprob | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """How likely the prompt's own tokens `index`, `index`+1, … are, each given those before it; `index` counts from 0."""

    run: int
    index: int
    logprobs: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run left the engine and its blocks are released. `state` is terminal.

    `code`: of the error in `schemas.errors` when FAILED is not the engine's fault.
    """

    run: int
    state: State
    reason: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. `prefilled`: runs whose prompt is computed and that wait for their handoff, blocks still held.

    `drafted`: tokens that were guessed ahead; `accepted`: those of them that were right. `prompts`: of runs that asked
    for it; what is here comes before `tokens`.
    `preemptions`: how many runs gave up their blocks before it, to wait or to end. `unfetched`: how many handoffs became older
    than an engine that moves KV itself keeps them.
    """

    tokens: tuple[TokenOutput, ...] = ()
    prefilled: Mapping[int, RunTotals] = field(default_factory=dict)
    ended: tuple[RunEnd, ...] = ()
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    prompts: tuple[PromptOutput, ...] = ()
    preemptions: int = 0
    unfetched: int = 0


OnStep = Callable[[StepReport], None]


class EngineWorn(InternalError):
    """The engine serves, but must be replaced: finish what runs, then end this process."""


@dataclass(slots=True)
class EngineStats:
    """Measured by the engine. `queued`: runs not yet in a step, and those overtaken; `queued_tokens`: their uncomputed tokens.

    `swapped`: runs whose KV waits outside the pool, which compute nothing.
    `step_tokens`: see `Scheduler.prompt_budget`; a worker queues no more than that. `in_step_s`: how long the
    step in progress has taken so far, 0.0 while there is none. `backlog`: uncomputed prompt tokens of all runs, those begun too;
    `yielding`: those of them that make way for an enterprise prompt that comes now, as `yielding_queued` of `queued` do.
    """

    queued: int = 0
    queued_tokens: int = 0
    step_tokens: int = 0
    running: int = 0
    backlog: int = 0
    yielding: int = 0
    yielding_queued: int = 0
    swapped: int = 0
    steps: int = 0
    step_p99_s: float = 0.0
    in_step_s: float = 0.0
    rates: Rates = field(default_factory=Rates)


class Engine(Protocol):
    """What both phases share."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def pool(self) -> BlockPool: ...

    def stats(self) -> EngineStats: ...

    async def warm_up(self) -> None:
        """Before anything else is asked: what only a first request tells (the pool's size) is known afterwards.

        Raises `HeadraceError` when the engine does not answer.
        """

    def start(self, on_step: OnStep) -> None:
        """Begins to compute; `on_step` is called once a step."""

    async def join(self) -> None:
        """Waits until the engine ends by itself, which is a fault: raises what broke it, or `EngineWorn`."""

    async def stop(self) -> None:
        """Drops every run, without a report, once the step in progress is over."""

    def cancel(self, run: int, choices: Collection[int] | None = None) -> None:
        """Drops the run, or these choices of it, within the step in progress; unknown runs and choices are ignored.

        Once nothing is left of the run, a `RunEnd` follows, unless its end was reported before: CANCELLED for a whole run,
        FINISHED when its last choice was dropped alone.
        """

    def pause(self) -> None:
        """No step begins until `resume`; the one in progress ends. Runs keep what they hold, and can be cancelled."""

    def resume(self) -> None: ...


class PrefillEngine(Engine, Protocol):
    def prefill(self, spec: RunSpec, *, then_decode: bool = False) -> None:
        """Computes the KV blocks of the run's `trunk`, and samples the next token of each open choice that ends there.

        With `then_decode` the run goes on decoding here (local prefill); blocks already held by the run (a reservation) are
        used. Raises `PoolExhausted` when the pool cannot hold it, `UnsupportedParameter` for what the engine cannot do,
        `ContextLengthExceeded`, `InvalidRequest` for ids outside the vocabulary; then the run's blocks are as they were.
        """


class DecodeEngine(PrefillEngine, Protocol):
    def decode(
        self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float, opaque: bytes = b""
    ) -> None:
        """Joins a run to the batch. Its blocks, held by the run, contain the KV of its `trunk`.

        `first` is not computed yet and not reported again; what ended with it is dropped. With `opaque` the engine brings the KV
        itself, however little room the run holds. Raises as `prefill` does, `UnreadableMessage` for an `opaque` it cannot use.
        """
