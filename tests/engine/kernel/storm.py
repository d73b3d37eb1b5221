"""Random trouble for two engines with the kernel: whatever happens, every row of logits is that of its ids computed alone.

Runs arrive, with one choice or several, are computed here or handed over, preempted, swapped, hit the prefix cache, are cancelled
and resumed. Every answer is what is drawn from such rows, one token after the other. After each action both pools' books are
checked. A storm is drawn from one seed, which says it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from schemas.handoff import FirstToken
from schemas.job import Choice, Sampling, Tier
from schemas.lifecycle import State
from services.engine.core import StepEngine
from services.engine.history import History
from services.engine.protocol import RunSpec, StepReport, TokenOutput
from services.engine.runner import Outcome, Sampled
from services.engine.sampling import Draw, sample
from services.engine.scheduler import Step
from services.engine.torch_engine.kernel.model import Floats
from services.kv.holders import RunHolder
from services.kv.pool import PoolExhausted
from tests.engine.kernel.rig import Machine

Ids = tuple[int, ...]
Said = dict[int, list[TokenOutput]]
"""What each choice got of one attempt, in order."""

HABITS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"frequency_penalty": 0.5, "temperature": 0.0},
    {"top_p": 0.7, "top_k": 9999, "logprobs": 2},
    {"min_p": 1.0, "logprobs": 0},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "logit_bias": {5: 4.0, 6: -100.0, 7: 4.0, 9: 4.0},
        "stop_token_ids": (5, 7),
        "min_tokens": 6,
        "logprobs": 20,
        "top_k": 40,
        "min_p": 0.01,
    },
)


class Gate:
    """Stands before an engine's runner: one step for each `go`. `seen`: logits by the ids they follow."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._model, runner._model = runner._model, self
        self._open = asyncio.Event()
        self._logits: Floats | None = None
        self.waiting = False
        self.stepped = asyncio.Event()
        self.seen: dict[Ids, bytes] = {}

    async def execute(self, step: Step) -> Sequence[Outcome] | None:
        self.waiting = True
        await self._open.wait()
        self._open.clear()
        self.waiting = False
        rows = [
            tuple(chunk.sequence.ids[: chunk.start] + chunk.ids[: row + 1]) for chunk in step.chunks for row in chunk.logit_rows
        ]
        outcomes: Sequence[Outcome] | None = await self._runner.execute(step)
        if outcomes is not None:
            assert self._logits is not None
            for ids, row in zip(rows, self._logits, strict=True):
                assert self.seen.setdefault(ids, row.tobytes()) == row.tobytes(), f"two rows after {ids}"
        self.stepped.set()
        return outcomes

    def go(self) -> None:
        self._open.set()

    def compute(self, *arguments: Any) -> Floats | None:
        """In the model's place."""
        self._logits = self._model.compute(*arguments)
        return self._logits

    def invite(self, threads: int) -> None:
        self._model.invite(threads)

    async def close(self) -> None:
        self._open.set()
        self._runner._model = self._model
        await self._runner.close()


class Storm:
    """`prefill` hands over to `decode`, which also computes by itself. `prompt` makes one; answers have `longest` tokens."""

    def __init__(
        self,
        seed: int,
        prefill: StepEngine,
        decode: StepEngine,
        alone: Machine,
        prompt: Callable[[Random], list[int]],
        longest: int,
    ) -> None:
        self._random = Random(seed)
        self._engines = {"prefill": prefill, "decode": decode}
        self._gates: dict[str, Gate] = {}
        self._alone = alone
        self._prompt = prompt
        self._longest = longest
        self._next = 0
        self._live: dict[int, tuple[str, RunSpec]] = {}
        self._first: dict[int, list[FirstToken]] = {}
        self._got: dict[int, Said] = {}
        self._answers: list[tuple[RunSpec, Said]] = []
        self._done: dict[int, set[int]] = {}
        self._resumable: list[RunSpec] = []
        self._handing_over: list[int] = []
        self.counts = dict.fromkeys(("rows", "drawn", "preempted", "swapped", "hits", "handoffs", "resumed", *State), 0)

    async def run(self, actions: int) -> None:
        """Raises AssertionError at the first row that differs, or when an engine's books are wrong."""
        for name, engine in self._engines.items():
            self._gates[name] = Gate(engine._runner)
            engine._runner = self._gates[name]
            engine.start(lambda report, name=name: self._on_step(name, report))  # type: ignore[misc]
        try:
            for number in range(actions):
                await self._act()
                for engine in self._engines.values():
                    engine.pool.check_integrity()
                if number % 500 == 499:
                    self._compare()
            self._compare()
        finally:
            for engine in self._engines.values():
                await engine.stop()
        for engine in self._engines.values():
            for run in self._handing_over:
                engine.pool.release(RunHolder(run))
            assert engine.pool.held == engine.pool.swap.used == 0
            engine.pool.check_integrity()

    async def _act(self) -> None:
        action = self._random.choices(
            (self._step, self._arrive, self._hand_over, self._cancel, self._resume), weights=(70, 12, 8, 4, 6)
        )[0]
        await action()

    async def _step(self) -> None:
        name = self._random.choice(("prefill", "decode", "decode"))
        gate = self._gates[name]
        await self._still()
        if gate.waiting:
            gate.stepped.clear()
            gate.go()
            async with asyncio.timeout(60):
                await gate.stepped.wait()
            await self._still()
        swapped = self._engines["decode"].stats().swapped
        self.counts["swapped"] = max(self.counts["swapped"], swapped)

    async def _still(self) -> None:
        """The engines have planned what they can, and moved what they must."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def _arrive(self) -> None:
        if len(self._live) >= 12:
            return
        n = self._random.choice((1, 1, 1, 2, 3))
        sampling = Sampling(
            seed=self._random.randrange(2**32),
            max_tokens=self._random.randint(1, self._longest),
            ignore_eos=self._random.random() < 0.5,
            prompt_logprobs=0 if self._random.random() < 0.05 else None,
            **self._random.choice(HABITS),
        )
        prompt = tuple(self._prompt(self._random))
        self._begin(prompt, tuple(Choice(index=index) for index in range(n)), sampling, self._random.choice(list(Tier)))

    async def _resume(self) -> None:
        if self._resumable and len(self._live) < 12:
            spec = self._resumable.pop(self._random.randrange(len(self._resumable)))
            self.counts["resumed"] += 1
            self._begin(spec.prompt, spec.choices, spec.sampling, spec.tier)

    def _begin(self, prompt: Ids, choices: tuple[Choice, ...], sampling: Sampling, tier: Tier) -> None:
        self._next += 1
        spec = RunSpec(self._next, prompt, choices, sampling, tier)
        name = self._random.choice(("prefill", "decode"))
        try:
            self._engines[name].prefill(spec, then_decode=name == "decode")
        except PoolExhausted:
            return
        self._live[spec.run] = name, spec
        self._got[spec.run] = {choice.index: [] for choice in choices}
        self._done[spec.run] = set()

    async def _hand_over(self) -> None:
        if not self._handing_over:
            return
        run = self._handing_over.pop(0)
        _, spec = self._live[run]
        here, there = self._engines["prefill"], self._engines["decode"]
        blocks = here.pool.blocks(RunHolder(run))
        try:
            into = there.pool.allocate(RunHolder(run), len(blocks))
        except PoolExhausted:
            here.pool.release(RunHolder(run))
            self._over(run, State.RETRY)
            return
        for source, target in zip(blocks, into, strict=True):
            there.pool.write(target, here.pool.read(source))
        here.pool.release(RunHolder(run))
        there.decode(spec, tuple(self._first.pop(run)), cached_tokens=0, compute_s=0.0)
        self._live[run] = "decode", spec
        self.counts["handoffs"] += 1

    async def _cancel(self) -> None:
        computing = [run for run in self._live if run not in self._handing_over]
        if not computing:
            return
        run = self._random.choice(computing)
        name, spec = self._live[run]
        some = self._random.random() < 0.4
        choices = [self._random.choice(spec.choices).index] if some else None
        if some:
            self._done[run].update(choices or ())
        self._engines[name].cancel(run, choices)

    def _on_step(self, name: str, report: StepReport) -> None:
        self.counts["preempted"] += report.preemptions
        for output in report.tokens:
            self._got[output.run][output.choice].append(output)
            self.counts["hits"] += output.cached_tokens > 0
            if output.finish is not None:
                self._done[output.run].add(output.choice)
            if name == "prefill":
                token = FirstToken(choice=output.choice, index=output.index, token=output.token, finish=output.finish)
                self._first.setdefault(output.run, []).append(token)
        for run in report.prefilled:
            self._first.setdefault(run, [])
            self._handing_over.append(run)
        for end in report.ended:
            assert end.state is not State.FAILED, end
            self._over(end.run, end.state)

    def _over(self, run: int, state: State) -> None:
        _, spec = self._live.pop(run)
        got, done = self._got.pop(run), self._done.pop(run)
        self._first.pop(run, None)
        self.counts[state] += 1
        self._answers.append((spec, got))
        left = tuple(
            Choice(index=choice.index, generated=(*choice.generated, *(output.token for output in got[choice.index])))
            for choice in spec.choices
            if choice.index not in done
        )
        if state in (State.RETRY, State.CANCELLED) and left and all(len(c.generated) < spec.sampling.max_tokens for c in left):
            self._resumable.append(RunSpec(run, spec.prompt, left, spec.sampling, spec.tier))

    def _compare(self) -> None:
        """Every row that was seen with the one that its ids give alone; one computation for all beginnings of a sequence."""
        for gate in self._gates.values():
            self.counts["rows"] += len(gate.seen)
            while gate.seen:
                longest = max(gate.seen, key=len)
                for end, row in enumerate(self._alone.whole(longest), start=1):
                    found = gate.seen.pop(longest[:end], None)
                    assert found in (None, row.tobytes()), f"the logits after {longest[:end]} are not those of these ids alone"
        for spec, said in self._answers:
            for choice in spec.choices:
                self._draw_again(spec, choice, said[choice.index])
        self._answers.clear()

    def _draw_again(self, spec: RunSpec, choice: Choice, said: Sequence[TokenOutput]) -> None:
        """Each token by itself, from the row that the ids before it give alone and a history made of them."""
        self.counts["drawn"] += len(said)
        before = [*spec.prompt, *choice.generated]
        rows = self._alone.whole([*before, *(output.token for output in said)])[len(before) - 1 :]
        history = History(spec.prompt)
        history.extend(choice.generated)
        enders = (*spec.sampling.stop_token_ids, *(() if spec.sampling.ignore_eos else self._engines["decode"].info.eos_ids))
        for index, (output, row) in enumerate(zip(said, rows, strict=False), start=len(choice.generated)):
            banned = enders if index < spec.sampling.min_tokens else ()
            (drawn,) = sample(row[None], [Draw(spec.sampling, choice.index, index, banned, history)])
            assert (output.index, drawn) == (index, Sampled(output.token, output.logprob)), f"{spec}, choice {choice.index}"
            history.extend([output.token])
