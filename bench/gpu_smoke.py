"""Does this machine's GPU compute, hand over, cancel and cache as it should, and how fast? A few minutes, one table.

    python bench/gpu_smoke.py [--model NAME] [--device cuda] [--engine torch|tensorrt-llm]

Two engines in this process hand over to each other. A token passes when transformers, on the same device and in the same
precision, finds none likelier by more than `--tie` logits: in bfloat16 nearly equal ones change places with the shape of a batch.
TensorRT-LLM's checks are others (`gpu_smoke_trtllm.py`); `--device`, `--dtype`, `--kv-blocks` and `--tie` mean nothing to them.
Exit code 0: all checks passed; 1: one failed; 77: skipped, there is no GPU, or no wheel of TensorRT-LLM.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":  # run as a file, the checkout is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from schemas.handoff import BlockRef, FirstToken
from schemas.job import Choice, Sampling
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec, StepReport
from services.engine.torch_engine.build import build
from services.engine.torch_engine.device import choose
from services.kv.holders import HandoffHolder, RunHolder
from services.kv.transfer.auto import TransferKind, open_carriers, transfer_client
from services.kv.transfer.client import SocketTransferClient
from services.kv.transfer.server import SocketTransferServer
from services.models.store import ModelFiles, ModelStore
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings

SKIPPED = 77
LIMIT_S = 120.0
STREAMS = (1, 8, 32)


class Engine:
    """One engine that runs, and when each of its tokens came."""

    def __init__(self, files: ModelFiles, options: argparse.Namespace) -> None:
        settings = WorkerSettings(device=options.device, dtype=options.dtype, kv_blocks=options.kv_blocks)
        self.engine: StepEngine = build(files, settings, SystemClock())
        self.tokens: dict[int, list[int]] = {}
        self.times: dict[int, list[float]] = {}
        self.cached: dict[int, int] = {}
        self.over: set[int] = set()
        self._news = asyncio.Event()
        self.engine.start(self._heard)

    def _heard(self, report: StepReport) -> None:
        for output in report.tokens:
            self.tokens.setdefault(output.run, []).append(output.token)
            self.times.setdefault(output.run, []).append(time.perf_counter())
            self.cached[output.run] = output.cached_tokens
        self.over |= {*report.prefilled, *(end.run for end in report.ended)}
        self._news.set()

    async def until_over(self, *runs: int) -> None:
        await self._until(lambda: self.over.issuperset(runs))

    async def until_tokens(self, run: int, count: int) -> None:
        await self._until(lambda: len(self.tokens.get(run, ())) >= count)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Smoke:
    """The checks; `rows` is the table."""

    def __init__(self, files: ModelFiles, options: argparse.Namespace) -> None:
        self.rows: list[tuple[str, bool, str]] = []
        self.here, self.there = Engine(files, options), Engine(files, options)
        self._files = files
        self._place = choose(WorkerSettings(device=options.device, dtype=options.dtype))
        self._model: Any = None
        self._tie = options.tie
        self._random = Random(3)
        self._runs = iter(range(1, 10_000))
        context = self.here.engine.info.context_length
        self.length, self.count = min(512, context // 2), min(64, context // 4)

    def row(self, name: str, passed: bool, value: str) -> None:
        self.rows.append((name, passed, value))
        print(f"{name:36} {'ok' if passed else 'FAILED':7} {value}", flush=True)

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(3, self.here.engine.info.vocab_size) for _ in range(length))

    def spec(self, prompt: Sequence[int], count: int) -> RunSpec:
        sampling = Sampling(seed=1, max_tokens=count, temperature=0.0, ignore_eos=True)
        return RunSpec(next(self._runs), tuple(prompt), (Choice(index=0),), sampling)

    async def generate(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[list[list[int]], float, list[RunSpec]]:
        """Tokens, seconds, and the runs, all sent at once."""
        specs = [self.spec(prompt, count) for prompt in prompts]
        started = time.perf_counter()
        for spec in specs:
            self.here.engine.prefill(spec, then_decode=True)
        await self.here.until_over(*(spec.run for spec in specs))
        return [self.here.tokens[spec.run] for spec in specs], time.perf_counter() - started, specs

    def compare(self, name: str, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Each of these (prompt, tokens) against transformers, which is given the tokens before."""
        model = self._reference()
        worst, equal, total = 0.0, 0, 0
        for prompt, tokens in pairs:
            ids = torch.tensor([[*prompt, *tokens]], device=model.device)
            with torch.inference_mode():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            behind = logits.max(dim=-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            worst, equal, total = max(worst, float(behind.max())), equal + int((behind == 0).sum()), total + len(tokens)
        self.row(name, worst <= self._tie, f"{equal} of {total} tokens equal, the worst is {worst:.3f} logits behind")

    def _reference(self) -> Any:
        from transformers import AutoModelForCausalLM

        if self._model is None:
            loaded: Any = AutoModelForCausalLM.from_pretrained(self._files.folder, dtype=self._place.dtype)
            self._model = loaded.to(self._place.device).eval()
        return self._model

    async def check_tokens(self) -> None:
        prompts = [self.prompt(length) for length in (1, 17, 100, self.length)]
        alone = [(await self.generate([prompt], self.count))[0][0] for prompt in prompts]
        self.compare("greedy, one by one", list(zip(prompts, alone, strict=True)))
        fresh = [self.prompt(length) for length in (5, 33, 64, 90) * 4]
        together, _, _ = await self.generate(fresh, self.count)
        self.compare("greedy, 16 in a batch", list(zip(fresh, together, strict=True)))

    async def check_prefix(self) -> None:
        prompt = self.prompt(self.length)
        cached, made = [], []
        for _ in range(2):
            tokens, _, (spec,) = await self.generate([prompt], self.count)
            made.append((prompt, tokens[0]))
            cached.append(self.here.cached[spec.run])
        expected = (self.length - 1) // 16 * 16
        self.row("prefix hit", cached == [0, expected], f"{cached[1]} of {self.length} prompt tokens cached")
        self.compare("greedy, after a prefix hit", made[1:])

    async def check_cancel(self) -> None:
        spec = self.spec(self.prompt(64), self.here.engine.info.context_length // 2)
        self.here.engine.prefill(spec, then_decode=True)
        await self.here.until_tokens(spec.run, 4)
        started = time.perf_counter()
        self.here.engine.cancel(spec.run)
        await self.here.until_over(spec.run)
        self.row("cancel", self.here.engine.pool.held == 0, f"{1e3 * (time.perf_counter() - started):.1f} ms to its end")

    async def check_handoff(self, kind: TransferKind) -> None:
        seconds, made = [], []
        server, client = SocketTransferServer(self.here.engine.pool, clock=SystemClock()), transfer_client(kind)
        await server.start("127.0.0.1", 0)
        await open_carriers(server, kind)
        for _ in range(5):
            spec = self.spec(self.prompt(self.length), self.count)
            self.here.engine.prefill(spec)
            await self.here.until_over(spec.run)
            started = time.perf_counter()
            await self._hand_over(server, client, spec)
            seconds.append(time.perf_counter() - started)
            first = self.here.tokens[spec.run][0]
            self.there.engine.decode(spec, (FirstToken(choice=0, index=0, token=first),), cached_tokens=0, compute_s=0.0)
            await self.there.until_over(spec.run)
            made.append((spec.prompt, [first, *self.there.tokens[spec.run]]))
        client.close()
        await server.close()
        clean = self.here.engine.pool.held == self.there.engine.pool.held == 0
        self.row(f"handoff of {self.length} tokens, {kind}", clean, f"{1e3 * statistics.median(seconds):.1f} ms")
        self.compare(f"greedy, after a handoff, {kind}", made)

    async def _hand_over(self, server: SocketTransferServer, client: SocketTransferClient, spec: RunSpec) -> None:
        here, there, holder = self.here.engine.pool, self.there.engine.pool, HandoffHolder(spec.run)
        kv_compat = self.here.engine.info.kv_compat
        here.transfer(RunHolder(spec.run), holder, expires=SystemClock().monotonic() + 2)
        refs = [BlockRef(slot=block, generation=here.generation(block)) for block in here.blocks(holder)]
        ticket = server.offer(holder, kv_compat=kv_compat, on_done=lambda *_: None)
        into = there.allocate(RunHolder(spec.run), len(refs))
        views = [there.view(block) for block in into]
        async with await client.fetch(ticket, refs, views, kv_compat=kv_compat, timeout=30) as fetched:
            assert await fetched.release(), "the transfer was not confirmed"
        await there.stage_in(into)

    async def measure(self) -> None:
        first = []
        for _ in range(5):
            started = time.perf_counter()
            _, _, (spec,) = await self.generate([self.prompt(self.length)], 2)
            first.append(self.here.times[spec.run][0] - started)
        self.row(f"time to first token, {self.length} tokens", True, f"{1e3 * statistics.median(first):.1f} ms")
        for streams in STREAMS:
            prompts = [self.prompt(16) for _ in range(streams)]
            _, seconds, _ = await self.generate(prompts, self.count)
            self.row(f"decode, {streams} streams", True, f"{streams * self.count / seconds:.0f} tokens/s")


async def smoke(options: argparse.Namespace) -> int:
    files = ModelStore(Settings().home_dir).open(options.model)
    checks = Smoke(files, options)
    info = checks.here.engine.info
    print(f"{info.model} on {options.device}, {checks.here.engine.pool.total} KV blocks an engine")
    await checks.generate([checks.prompt(16)], 4)  # the first step loads kernels
    await checks.check_tokens()
    await checks.check_prefix()
    await checks.check_cancel()
    await checks.check_handoff("shm")
    await checks.check_handoff("tcp")
    await checks.measure()
    for engine in (checks.here.engine, checks.there.engine):
        await engine.stop()
        engine.pool.check_integrity()
    return 0 if all(passed for _, passed, _ in checks.rows) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["torch", "tensorrt-llm"], default="torch")
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--kv-blocks", type=int, default=1024, help="of each of the two engines")
    parser.add_argument("--tie", type=float, default=0.25, help="logits that two tokens may differ by and count as equal")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no GPU")
        return SKIPPED
    return asyncio.run(trtllm(options) if options.engine == "tensorrt-llm" else smoke(options))


async def trtllm(options: argparse.Namespace) -> int:
    """Two engines on one GPU, each with a third of what its weights leave; the timeout is short, so that an orphan is.

    Grammars are on, as they are to be checked, whatever the settings say.
    """
    from tokenizers import Tokenizer

    from bench import gpu_smoke_trtllm
    from schemas.state import Role
    from services.engine.trtllm_engine.build import build as build_trtllm
    from services.engine.trtllm_engine.findings import Verdict
    from services.engine.trtllm_engine.verifier import find, verify

    if (package := verify(find())).verdict is not Verdict.PASSED:
        print(package.verdict, *package.wrong, sep="\n")
        return SKIPPED if package.verdict is Verdict.SKIPPED else 1
    ours = Settings().trtllm
    guided = ours.guided_decoding or "xgrammar"
    settings = ours.model_copy(update={"kv_fraction": 0.3, "transfer_timeout_s": 20.0, "guided_decoding": guided})
    files = ModelStore(Settings().home_dir).open(options.model)
    clock = SystemClock()
    spell = Tokenizer.from_file(str(files.tokenizer)).decode
    return await gpu_smoke_trtllm.smoke(lambda role: build_trtllm(files, settings, clock, Role(role)), spell, 20.0)


if __name__ == "__main__":
    sys.exit(main())
