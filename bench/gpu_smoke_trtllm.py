"""What nobody could run where TensorRT-LLM's adapter was written: its rules and claims, checked on a GPU in under ten minutes.

    python bench/gpu_smoke.py --engine tensorrt-llm --model FOLDER

Two engines in this process, prefill and decode, hand over through TensorRT-LLM's transceiver. A claim that was declared and does
not hold fails; one that holds although it was not declared is told. A check that breaks off fails, and the next one is made all
the same: time on a GPU is rare.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench.trtllm_shapes import of_events, of_statistics
from schemas.handoff import FirstToken
from schemas.job import Choice, Grammar, Sampling
from schemas.lifecycle import State
from services.engine.protocol import RunEnd, RunSpec, RunTotals, StepReport
from services.engine.trtllm_engine.engine import TrtllmEngine

LIMIT_S = 120.0
"""Of what is waited for."""
BUDGET_S = 540.0
"""Of all checks; loading the model is not among them."""
LENGTH, COUNT, ROUNDS = 512, 64, 5
Open = Callable[[str], TrtllmEngine]
Spell = Callable[[Sequence[int]], str]
"""Tokens as text."""


@dataclass
class Side:
    """One engine and what it said, with times."""

    engine: TrtllmEngine
    tokens: dict[int, list[int]] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)
    prefilled: dict[int, RunTotals] = field(default_factory=dict)
    ended: dict[int, RunEnd] = field(default_factory=dict)

    def hear(self, report: StepReport) -> None:
        for output in report.tokens:
            self.tokens.setdefault(output.run, []).append(output.token)
            self.times.setdefault(output.run, []).append(time.perf_counter())
        self.prefilled |= report.prefilled
        self.ended |= {end.run: end for end in report.ended}


async def until(condition: Callable[[], object], limit: float = LIMIT_S) -> float:
    """How long it took. Raises TimeoutError."""
    started = time.perf_counter()
    async with asyncio.timeout(limit):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return time.perf_counter() - started


class Checks:
    def __init__(
        self, prefill: Side, decode: Side, spell: Spell, timeout_s: float, *, length: int = LENGTH, count: int = COUNT
    ) -> None:
        self.prefill, self.decode, self.spell = prefill, decode, spell
        self.timeout_s, self.length, self.count = timeout_s, length, count
        self.passed = True
        self._runs = iter(range(1, 10_000))
        self._random = Random(3)

    def row(self, name: str, passed: bool, value: str) -> None:
        self.passed &= passed
        print(f"{name:40} {'ok' if passed else 'FAILED':7} {value}", flush=True)

    async def attempt(self, check: Callable[[], Awaitable[None]]) -> None:
        """One that breaks off fails, with what broke it."""
        try:
            await check()
        except Exception as error:  # whatever it is, the next check may still tell something
            self.row(f"{check.__name__} was broken off", False, repr(error))

    def spec(self, length: int = 0, count: int = 0, **sampling: Any) -> RunSpec:
        drawn = (self._random.randrange(20, self.prefill.engine.info.vocab_size) for _ in range(length or self.length))
        given = {"temperature": 0.0, "ignore_eos": True} | sampling
        return RunSpec(
            next(self._runs), tuple(drawn), (Choice(index=0),), Sampling(seed=1, max_tokens=count or self.count, **given)
        )

    def _tokens(self, spec: RunSpec) -> list[int]:
        """Of both."""
        return [*self.prefill.tokens[spec.run], *self.decode.tokens.get(spec.run, [])]

    async def hand_off(self, spec: RunSpec) -> bytes:
        self.prefill.engine.prefill(spec)
        await until(lambda: spec.run in self.prefill.prefilled)
        return self.prefill.prefilled[spec.run].opaque

    def consume(self, spec: RunSpec, opaque: bytes) -> None:
        first = (FirstToken(choice=0, index=0, token=self.prefill.tokens[spec.run][0]),)
        self.decode.engine.decode(spec, first, cached_tokens=0, compute_s=0.0, opaque=opaque)

    async def alone(self, spec: RunSpec) -> list[int]:
        """Both phases on the decode engine."""
        again = RunSpec(next(self._runs), spec.prompt, spec.choices, spec.sampling)
        self.decode.engine.prefill(again, then_decode=True)
        await until(lambda: again.run in self.decode.ended)
        return self.decode.tokens.get(again.run, [])

    # before the engines are started, when nobody else reads what they say

    async def shapes(self) -> None:
        """Statistics and events of one request, against the contract."""
        engine = self.decode.engine
        prompt = range(20, 20 + 3 * engine.info.block_tokens)
        await self._direct(prompt, {})
        stats = [item async for item in engine.llm.get_stats_async(timeout=2)]
        events = [item async for item in engine.llm.get_kv_cache_events_async(timeout=2)]
        self.row("statistics", *of_statistics(stats))
        self.row("kv events", *of_events(events, prompt, engine.info.block_tokens))

    async def claims(self) -> None:
        """Seeds and penalties, which 1.2.1 is said to ignore."""
        prompt, declared = range(20, 84), self.decode.engine.info.capabilities
        drawn = [await self._direct(prompt, {"temperature": 1.0, "top_p": 1.0, "seed": 7}) for _ in range(3)]
        self._claim("a seed repeats its tokens", declared.seed, drawn[0] == drawn[1] == drawn[2])
        plain = await self._direct(prompt, {})
        changed = await self._direct(prompt, {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0})
        self._claim("penalties change tokens", declared.penalties, plain != changed)

    def _claim(self, name: str, declared: bool, holds: bool) -> None:
        self.row(name, holds or not declared, f"declared {declared}, measured {holds}")

    async def _direct(self, prompt: Iterable[int], sampling: dict[str, Any]) -> list[int]:
        engine = self.decode.engine
        end = min(engine.info.eos_ids)
        given = {"end_id": end, "pad_id": end, "max_tokens": self.count, "ignore_eos": True, "detokenize": False} | sampling
        result = engine.llm.generate_async(list(prompt), engine.api.sampling_params(**given), streaming=True)
        tokens: list[int] = []
        async with asyncio.timeout(LIMIT_S):
            async for output in result:
                tokens = list(output.outputs[0].token_ids)
        return tokens

    # afterwards

    async def handoffs(self) -> None:
        seconds, equal = [], 0
        for _ in range(ROUNDS):
            spec = self.spec()
            opaque = await self.hand_off(spec)
            self.consume(spec, opaque)
            seconds.append(await until(lambda run=spec.run: self.decode.tokens.get(run) or run in self.decode.ended))  # type: ignore[misc]
            await until(lambda run=spec.run: run in self.decode.ended)  # type: ignore[misc]
            equal += self._tokens(spec) == await self.alone(spec)
        self.row("handoff and first chunk", True, f"{1e3 * statistics.median(seconds):.1f} ms of {self.length} tokens")
        self.row("greedy, handed over and alone", equal == ROUNDS, f"{equal} of {ROUNDS} answers are equal")

    async def grammar(self) -> None:
        """Whether the first token, which prefill draws, and those behind it keep to one grammar."""
        if "regex" not in self.prefill.engine.info.capabilities.grammar:
            self.row("grammar on token 1", True, "NOT CHECKED: trtllm.guided_decoding is not set")
            return
        spec = self.spec(count=8, grammar=Grammar(kind="regex", source="[0-9]{64}"))
        self.consume(spec, await self.hand_off(spec))
        await until(lambda: spec.run in self.decode.ended)
        tokens = self._tokens(spec)
        text = self.spell(tokens)
        kept = len(tokens) == 8 and re.fullmatch("[0-9]+", text) is not None
        self.row("grammar on token 1", kept, f"{text!r} of eight tokens of digits; alone {self.spell(await self.alone(spec))!r}")

    async def cancels(self) -> None:
        before = self.spec(length=4 * self.length)
        self.prefill.engine.prefill(before)
        self.prefill.engine.cancel(before.run)
        took = await until(lambda: before.run in self.prefill.ended or before.run in self.prefill.prefilled)
        if before.run in self.prefill.prefilled:  # it was too late, so it is consumed
            self.consume(before, self.prefill.prefilled[before.run].opaque)
            self.decode.engine.cancel(before.run)
            await until(lambda: before.run in self.decode.ended)
        self.row("cancel before commit", True, f"{1e3 * took:.1f} ms")
        during = self.spec(count=4 * self.count)
        self.consume(during, await self.hand_off(during))
        self.decode.engine.cancel(during.run)
        took = await until(lambda: during.run in self.decode.ended)
        self.row("cancel during transfer", self.decode.ended[during.run].state is State.CANCELLED, f"{1e3 * took:.1f} ms")
        after = self.spec(count=4 * self.count)
        self.consume(after, await self.hand_off(after))
        await until(lambda: self.decode.tokens.get(after.run))
        self.decode.engine.cancel(after.run)
        took = await until(lambda: after.run in self.decode.ended)
        self.row("cancel while decoding", self.decode.ended[after.run].state is State.CANCELLED, f"{1e3 * took:.1f} ms")
        took = await until(lambda: self.prefill.engine.pool.held == 0)
        self.row("nothing is kept", True, f"after {took:.1f} s")

    async def orphan(self) -> None:
        await self.hand_off(self.spec())
        kept = self.prefill.engine.pool.held
        try:
            took = await until(lambda: self.prefill.engine.pool.held == 0, limit=3 * self.timeout_s + 10)
        except TimeoutError:
            self.row("orphan freed at the timeout", False, f"{self.prefill.engine.pool.held} blocks are still in use")
        else:
            self.row("orphan freed at the timeout", kept > 0, f"after {took:.1f} s; the timeout is {self.timeout_s:.0f} s")

    async def measure(self, streams: Sequence[int] = (1, 8, 32)) -> None:
        first = []
        for _ in range(ROUNDS):
            spec, started = self.spec(), time.perf_counter()
            self.consume(spec, await self.hand_off(spec))
            first.append(self.prefill.times[spec.run][0] - started)
            await until(lambda run=spec.run: run in self.decode.ended)  # type: ignore[misc]
        self.row(f"time to first token, {self.length} tokens", True, f"{1e3 * statistics.median(first):.1f} ms")
        for many in streams:
            specs = [self.spec(length=16) for _ in range(many)]
            started = time.perf_counter()
            for spec in specs:
                self.decode.engine.prefill(spec, then_decode=True)
            await until(lambda specs=specs: all(spec.run in self.decode.ended for spec in specs))  # type: ignore[misc]
            self.row(f"decode, {many} streams", True, f"{many * self.count / (time.perf_counter() - started):.0f} tokens/s")


async def smoke(open_engine: Open, spell: Spell, timeout_s: float, *, length: int = LENGTH, count: int = COUNT) -> int:
    """`open_engine("prefill" | "decode")`: an engine that is not warm. The exit code."""
    prefill, decode = Side(open_engine("prefill")), Side(open_engine("decode"))
    for side in (prefill, decode):
        await side.engine.warm_up()
    checks = Checks(prefill, decode, spell, timeout_s, length=length, count=count)
    try:
        async with asyncio.timeout(BUDGET_S):
            for check in (checks.shapes, checks.claims):
                await checks.attempt(check)
            for side in (prefill, decode):
                side.engine.start(side.hear)
            for check in (checks.handoffs, checks.grammar, checks.cancels, checks.measure, checks.orphan):
                await checks.attempt(check)
    except TimeoutError:
        checks.row("all of it", False, f"not over in {BUDGET_S:.0f} s")
    finally:
        await asyncio.gather(prefill.engine.stop(), decode.engine.stop())
    return 0 if checks.passed else 1
