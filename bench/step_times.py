"""Where each millisecond of a kernel step goes, part by part, and how far each is from the machine's memory and arithmetic.

    .venv/bin/python -m bench.engine --profile

A build of the kernel that reads a clock after each part of each layer; the production build has none of it. Every figure is the
median over the steps. GB/s count the bytes of weights that a part reads once, GFLOP/s two operations a weight and row.
"""

from __future__ import annotations

import ctypes
import statistics
from typing import Any

from bench.kernel import BLOCKS, PROMPT, decode_step, prompt_step
from services.engine.host import available_memory
from services.engine.scheduler import Chunk, Step
from services.engine.torch_engine.config import LlamaConfig
from services.engine.torch_engine.kernel.batch import build_batch
from services.engine.torch_engine.kernel.checkpoint import map_checkpoint
from services.engine.torch_engine.kernel.compiler import NATIVE, build, find_compiler
from services.engine.torch_engine.kernel.library import Library
from services.engine.torch_engine.kernel.memory import allocate
from services.engine.torch_engine.kernel.model import KernelModel, StopFlag
from services.engine.torch_engine.pool_size import Room
from services.models.store import ModelFiles
from services.settings.settings import Settings
from services.settings.worker import WorkerSettings

PARTS = ("embedding", "norms", "q, k, v", "rotate, write KV", "attention", "output", "gate and up", "down", "head")
WEIGHT_BYTES = 2
CHUNK = 64


class Profile:
    """The kernel built with its clock, over one model."""

    def __init__(self, files: ModelFiles, config: LlamaConfig, settings: Settings, threads: int) -> None:
        path = build(settings.home_dir / "kernels", find_compiler(), target=(*NATIVE, "-DHR_PROFILE"))
        library = Library(path)
        kv = allocate(library, config, WorkerSettings(kv_blocks=BLOCKS), Room(available_memory()), None)
        tensors = map_checkpoint(files.safetensors)
        self._model = KernelModel(library, config, tensors, kv.content, max_rows=PROMPT, max_threads=threads)
        self._threads = threads
        clock: Any = ctypes.CDLL(str(path)).hr_profile
        clock.argtypes, clock.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_double)
        self._seconds = clock(self._model._handle)

    def parts(self, step: Step, repeat: int) -> list[float]:
        """Median seconds of each part."""
        turns = [self._once(step) for _ in range(repeat + 1)][1:]
        return [statistics.median(turn[part] for turn in turns) for part in range(len(PARTS))]

    def _once(self, step: Step) -> list[float]:
        before = self._seconds[: len(PARTS)]
        self._model.compute(build_batch(step), StopFlag(), self._threads)
        return [now - then for now, then in zip(self._seconds[: len(PARTS)], before, strict=True)]


def weights(config: LlamaConfig) -> tuple[int, ...]:
    """How many weights each of PARTS multiplies with, all layers together."""
    queries, keys, hidden = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.hidden
    of_layer = (0, 0, hidden * (queries + 2 * keys), 0, 0, hidden * queries, 2 * hidden * config.intermediate)
    return (*(config.layers * count for count in (*of_layer, hidden * config.intermediate)), hidden * config.vocab)


def report(files: ModelFiles, config: LlamaConfig, settings: Settings, threads: int, repeat: int) -> None:
    """A Markdown table: ms of each part, of a decode step and of prompt chunks."""
    profile = Profile(files, config, settings, threads)
    (whole,) = prompt_step().chunks
    steps = {f"decode {rows}": (rows, decode_step(rows)) for rows in (1, 8, 16, 32)}
    for size in (CHUNK, PROMPT):
        steps[f"prompt {size}"] = (size, Step((Chunk(whole.sequence, 0, size, samples=True),)))
    columns = {name: profile.parts(step, repeat) for name, (_, step) in steps.items()}
    print(f"| ms, {threads} threads | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for number, part in enumerate(PARTS):
        print(f"| {part} | {' | '.join(f'{1e3 * parts[number]:.2f}' for parts in columns.values())} |")
    print(f"| **all** | {' | '.join(f'**{1e3 * sum(parts):.2f}**' for parts in columns.values())} |")
    each = weights(config)
    rates, operations = [], []
    for name, parts in columns.items():
        rows, step = steps[name]
        sampled = sum(chunk.samples for chunk in step.chunks)
        multiplied = sum(each[:-1]) * rows + each[-1] * sampled
        rates.append(f"{WEIGHT_BYTES * sum(each) / sum(parts) / 1e9:.1f}")
        operations.append(f"{2 * multiplied / sum(parts) / 1e9:.0f}")
    print(f"| GB/s of weights | {' | '.join(rates)} |\n| GFLOP/s | {' | '.join(operations)} |")
