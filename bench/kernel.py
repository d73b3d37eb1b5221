"""What one step costs, in ms: the C kernel, and pure torch beside it, on the same model, alone on the machine.

    python bench/kernel.py [--model NAME] [--threads 1 2] [--repeat 9] [--without-torch]

Decode rows at a context of 256 tokens, and a prompt of 512 tokens in one step; medians. Rows a second say what a server can
reach; GFLOP/s count two operations a weight. Other work on the machine shows at once in the runs with several threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from random import Random

import numpy as np

from schemas.job import Choice, Sampling
from services.engine.host import available_memory
from services.engine.protocol import RunSpec
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import Sequence
from services.engine.torch_engine.config import LlamaConfig, load_config
from services.engine.torch_engine.kernel.batch import build_batch
from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine.kernel.library import BLOCK_TOKENS
from services.engine.torch_engine.kernel.memory import allocate
from services.engine.torch_engine.kernel.model import KernelModel, StopFlag
from services.engine.torch_engine.kernel.start import load_kernel
from services.engine.torch_engine.pool_size import Room
from services.models.store import ModelFiles, ModelStore
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings

DECODE_ROWS = (1, 8, 16, 32)
CONTEXT = 256
PROMPT = 512
BLOCKS = 700
Compute = Callable[[Step, int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings().model)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--without-torch", action="store_true")
    options = parser.parse_args()
    settings = Settings()
    files = ModelStore(settings.home_dir).open(options.model)
    config = load_config(files.config)
    engines = {"kernel": kernel(files, config, settings, max(options.threads))}
    if not options.without_torch:
        engines["torch"] = pure_torch(files, config)
    for name, compute in engines.items():
        for threads in options.threads:
            report(name, compute, threads, options.repeat, weights_of_one_token(config))


def kernel(files: ModelFiles, config: LlamaConfig, settings: Settings, threads: int) -> Compute:
    loaded = load_kernel(settings.home_dir / "kernels")
    if loaded is None:
        raise SystemExit("no kernel here")
    print(f"kernel for {loaded.library.isa}, exact: {loaded.exact}")
    kv = allocate(loaded.library, config, WorkerSettings(kv_blocks=BLOCKS), Room(available_memory()), None)
    tensors = map_checkpoint(files.safetensors)
    model = KernelModel(loaded.library, config, tensors, kv.content, max_rows=PROMPT, max_threads=threads)
    return lambda step, count: model.compute(build_batch(step), StopFlag(), count)


def pure_torch(files: ModelFiles, config: LlamaConfig) -> Compute:
    import torch

    from services.engine.torch_engine import batch, memory
    from services.engine.torch_engine.model import Llama
    from services.engine.torch_engine.weights import load_weights

    kv = memory.allocate(config, WorkerSettings(kv_blocks=BLOCKS), Room(available_memory()))
    model = Llama(config, load_weights(files.safetensors, config), kv.tensor)

    def compute(step: Step, threads: int) -> object:
        torch.set_num_threads(threads)
        return model.forward(batch.build_batch(step), lambda: False)

    return compute


def report(name: str, compute: Compute, threads: int, repeat: int, weights: int) -> None:
    for rows in DECODE_ROWS:
        seconds = measure(compute, decode_step(rows), threads, repeat)
        say(name, threads, f"decode {rows:2}", rows, seconds)
    seconds = measure(compute, prompt_step(), threads, max(1, repeat // 3))
    say(name, threads, f"prompt {PROMPT}", PROMPT, seconds, f"{2 * weights * PROMPT / seconds / 1e9:.0f} GFLOP/s")


def say(name: str, threads: int, what: str, tokens: int, seconds: float, more: str = "") -> None:
    print(f"{name:6} {threads} threads  {what:10} {seconds * 1e3:8.1f} ms  {tokens / seconds:6.0f} tokens/s  {more}", flush=True)


def measure(compute: Compute, step: Step, threads: int, repeat: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        compute(step, threads)
        return time.perf_counter() - started

    once()
    return statistics.median(once() for _ in range(repeat))


def decode_step(rows: int) -> Step:
    """One more token for each of `rows` sequences; what their KV blocks hold changes no time."""
    blocks = np.random.default_rng(1).permutation(BLOCKS).tolist()
    each = CONTEXT // BLOCK_TOKENS
    chosen = (blocks[row * each : (row + 1) * each] for row in range(rows))
    return Step(tuple(Chunk(sequence(CONTEXT, own), CONTEXT - 1 - row % 15, 1, True) for row, own in enumerate(chosen)))


def prompt_step() -> Step:
    return Step((Chunk(sequence(PROMPT, list(range(PROMPT // BLOCK_TOKENS))), 0, PROMPT, True),))


def sequence(length: int, blocks: list[int]) -> Sequence:
    random = Random(length)
    ids = [random.randrange(100, 10_000) for _ in range(length)]
    spec = RunSpec(1, tuple(ids), (Choice(index=0),), Sampling(seed=0, max_tokens=1))
    return Sequence(spec, 0, ids, tuple(blocks), arrival=0, then_decode=True)


def weights_of_one_token(config: LlamaConfig) -> int:
    """Of all layers; a prompt's head is computed for its last token only."""
    attention = config.hidden * config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return config.layers * (attention + 3 * config.hidden * config.intermediate)


if __name__ == "__main__":
    main()
