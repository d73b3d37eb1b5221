"""The adapter over the double: one engine, or a pair that shares a world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling
from schemas.lifecycle import State
from schemas.state import Role
from services.clock import SystemClock
from services.engine.protocol import EngineInfo, RunEnd, RunSpec, RunTotals, StepReport, TokenOutput
from services.engine.trtllm_engine.capabilities import capabilities
from services.engine.trtllm_engine.contract import VERSION
from services.engine.trtllm_engine.engine import TrtllmEngine
from services.engine.trtllm_engine.options import options
from services.settings.trtllm import TrtllmSettings
from tests.engine.trtllm_engine.double import EOS, VOCAB, World, api, drawn

BLOCK_TOKENS = 4
TIMEOUT_S = 1.0
INFO = EngineInfo(
    name="tensorrt-llm",
    version=VERSION,
    model="m",
    weights="w",
    kv_compat="k",
    capabilities=capabilities(TrtllmSettings()),
    context_length=512,
    vocab_size=VOCAB,
    block_tokens=BLOCK_TOKENS,
    eos_ids=frozenset({EOS}),
    step_tokens=64,
    max_batch=8,
)


def build(world: World, role: Role, timeout_s: float = TIMEOUT_S, adapters: Mapping[str, Path] | None = None) -> TrtllmEngine:
    """As `trtllm_engine.build` does it, without a model's files. It is not warm yet."""
    own = {"block_tokens": BLOCK_TOKENS, "step_tokens": 64, "max_batch": 8, "transfer_timeout_s": timeout_s}
    settings = TrtllmSettings(**own, adapters=adapters or {})
    given, chosen = api(world), options(settings, role, 512)
    llm = given.llm(
        "m",
        kv_cache_config=given.kv_cache_config(**chosen.kv_cache),
        cache_transceiver_config=given.transceiver_config(**chosen.transceiver),
        **chosen.llm,
    )
    info = replace(INFO, capabilities=capabilities(settings))
    requests = {
        name: given.lora_request(name, number, str(path)) for number, (name, path) in enumerate(settings.adapters.items(), 1)
    }
    return TrtllmEngine(given, llm, info, SystemClock(), timeout_s=timeout_s, shutdown_s=1.0, adapters=requests)


@dataclass
class Heard:
    """One engine and what it reported."""

    engine: TrtllmEngine
    outputs: list[TokenOutput] = field(default_factory=list)
    prefilled: dict[int, RunTotals] = field(default_factory=dict)
    ended: dict[int, RunEnd] = field(default_factory=dict)

    def on_step(self, report: StepReport) -> None:
        self.outputs += report.tokens
        self.prefilled |= report.prefilled
        for end in report.ended:
            assert end.run not in self.ended, "a run ends once"
            self.ended[end.run] = end

    def tokens(self, run: int) -> list[int]:
        mine = [output for output in self.outputs if output.run == run]
        begin = mine[0].index if mine else 0
        assert [output.index for output in mine] == list(range(begin, begin + len(mine)))
        return [output.token for output in mine]

    def first(self, run: int) -> tuple[FirstToken, ...]:
        return tuple(FirstToken(choice=o.choice, index=o.index, token=o.token) for o in self.outputs if o.run == run)

    def state(self, run: int) -> State | None:
        return self.ended[run].state if run in self.ended else None


@asynccontextmanager
async def engines(world: World, *roles: Role, timeout_s: float = TIMEOUT_S) -> AsyncIterator[list[Heard]]:
    """One engine a role, warm and started."""
    heard = [Heard(build(world, role, timeout_s)) for role in roles]
    for one in heard:
        await one.engine.warm_up()
        one.engine.start(one.on_step)
    try:
        yield heard
    finally:
        await asyncio.gather(*(one.engine.stop() for one in heard))
        for one in heard:
            one.engine.pool.check_integrity()


def spec(
    run: int, prompt: list[int] | None = None, *, most: int = 6, generated: tuple[int, ...] = (), **sampling: Any
) -> RunSpec:
    return RunSpec(
        run=run,
        prompt=tuple(prompt or range(20, 30)),
        choices=(Choice(index=0, generated=generated),),
        sampling=Sampling(seed=1, max_tokens=most, **sampling),
    )


def answer(prompt: list[int], most: int, generated: tuple[int, ...] = ()) -> list[int]:
    """What the double generates after prompt and generated tokens, which it sees as one prompt."""
    made: list[int] = []
    while len(made) < most:
        made.append(drawn([*prompt, *generated], made))
    return made
