"""What speculative decoding is worth: tokens/s of one engine with it and without it, and how many guesses are right.

    python -m bench.speculative [--model NAME] [--tokens 7] [--streams 1 2] [--rounds 5] [--length 128]

Greedy answers to prompts of several kinds, from text that repeats itself to a story; the two engines take turns, round by round,
because other work on the machine shows in both. Each prompt is prefilled before the clock starts. The answers are compared: a
difference is an error. Figures mean something on a quiet machine only; its load is printed first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

from schemas.job import Choice, Sampling
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec, StepReport
from services.engine.torch_engine.build import build
from services.models.store import ModelFiles, ModelStore
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings
from services.text.assets import read_assets
from services.text.prompt import PromptEncoder
from services.text.template import ChatTemplate
from services.text.tokenizer import Tokenizer

PROMPTS = {
    "repeat": "Repeat this text word for word, three times: The quick brown fox jumps over the lazy dog near the old mill.",
    "edit": "Return this Python function with the name `total` changed to `amount`, and nothing else:\n"
    "def add(values):\n    total = 0\n    for value in values:\n        total += value\n    print(total)\n    return total\n",
    "list": "List the numbers from 1 to 40, each on its own line, as 'number 1', 'number 2' and so on.",
    "story": "Tell a short story about a lighthouse keeper and a storm.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--tokens", type=int, default=7, help="worker.speculative_tokens")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    asyncio.run(bench(parser.parse_args()))


async def bench(options: argparse.Namespace) -> None:
    settings = Settings()
    files = ModelStore(settings.home_dir).open(options.model)
    print(f"{options.model}, {options.tokens} tokens ahead, load {os.getloadavg()[0]:.1f}")
    print(f"{'prompt':8} {'streams':>7} {'plain tok/s':>12} {'guessing tok/s':>15} {'ratio':>6} {'right':>6}")
    plain, guessing = Timed(files, settings, 0), Timed(files, settings, options.tokens)
    for name, prompt in prompts(files).items():
        for streams in options.streams:
            pairs = [
                (await plain.answer(prompt, streams, options.length), await guessing.answer(prompt, streams, options.length))
                for _ in range(options.rounds)
            ]
            if any(mine.ids != theirs.ids for mine, theirs in pairs):
                raise SystemExit(f"{name}: the answers differ")
            ratio = statistics.median(theirs.rate / mine.rate for mine, theirs in pairs)
            rates = [statistics.median(one.rate for one in column) for column in zip(*pairs, strict=True)]
            right = sum(one.accepted for _, one in pairs) / max(1, sum(one.drafted for _, one in pairs))
            print(f"{name:8} {streams:7} {rates[0]:12.1f} {rates[1]:15.1f} {ratio:6.2f} {right:6.0%}", flush=True)
    await plain.engine.stop()
    await guessing.engine.stop()


def prompts(files: ModelFiles) -> dict[str, tuple[int, ...]]:
    assets = read_assets(files.folder)
    encoder = PromptEncoder(Tokenizer(assets), ChatTemplate(assets, SystemClock()))
    return {name: tuple(encoder.encode([{"role": "user", "content": text}])) for name, text in PROMPTS.items()}


class Answered:
    """What `streams` equal runs generated, and in what time since all had their first token."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.drafted = 0
        self.accepted = 0
        self.ended = 0
        self.began = self.over = 0.0
        self.timed = 0

    @property
    def rate(self) -> float:
        """Tokens a second of all streams."""
        return self.timed / (self.over - self.began)


class Timed:
    """An engine that notes when its runs got which tokens."""

    def __init__(self, files: ModelFiles, settings: Settings, guess: int) -> None:
        worker = WorkerSettings(kv_blocks=512, prefix_cache=False, speculative_tokens=guess)
        self.engine: StepEngine = build(files, worker, SystemClock(), kernels=settings.home_dir / "kernels")
        self._answer = Answered()
        self._done = asyncio.Event()
        self._streams = 0
        self.engine.start(self._on_step)

    async def answer(self, prompt: tuple[int, ...], streams: int, length: int) -> Answered:
        self._answer, self._streams = Answered(), streams
        self._done.clear()
        for run in range(streams):
            sampling = Sampling(seed=run, max_tokens=length, temperature=0.0, ignore_eos=True)
            self.engine.prefill(RunSpec(run, prompt, (Choice(index=0),), sampling), then_decode=True)
        async with asyncio.timeout(600):
            await self._done.wait()
        return self._answer

    def _on_step(self, report: StepReport) -> None:
        answer, now = self._answer, time.perf_counter()
        for output in report.tokens:
            answer.ids.setdefault(output.run, []).append(output.token)
        if answer.began:
            answer.timed += len(report.tokens)
        elif len(answer.ids) == self._streams:
            answer.began = now
        answer.drafted += report.drafted
        answer.accepted += report.accepted
        answer.ended += len(report.ended)
        answer.over = now
        if answer.ended == self._streams:
            self._done.set()


if __name__ == "__main__":
    main()
