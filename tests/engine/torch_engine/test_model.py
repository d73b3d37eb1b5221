"""Our forward pass against transformers on the same weights: whole, chunked, batched, over scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from random import Random

import pytest
import torch
from torch import Tensor

from schemas.job import Choice, Sampling
from services.engine.protocol import RunSpec
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import Sequence
from services.engine.torch_engine import memory
from services.engine.torch_engine.batch import build_batch
from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.device import CPU, Place
from services.engine.torch_engine.model import Llama
from services.engine.torch_engine.pool_size import Room
from services.engine.torch_engine.weights import load_weights
from services.settings.worker import WorkerSettings
from tests.engine.torch_engine import tiny

BLOCKS = 96


class Bench:
    """A model over a KV memory full of NaN, whose blocks are given out in a random order."""

    def __init__(self, model: tiny.Tiny, place: Place = CPU) -> None:
        config = load_config(model.files.config)
        self.kv = memory.allocate(config, WorkerSettings(kv_blocks=BLOCKS), Room(2**30), place=place).tensor
        self.kv.fill_(float("nan"))
        self.llama = Llama(config, load_weights(model.files.safetensors, config, place), self.kv)
        self._free = list(range(BLOCKS))
        Random(5).shuffle(self._free)

    def sequence(self, ids: Seq[int]) -> Sequence:
        blocks = tuple(self._free.pop() for _ in range(len(ids) // memory.BLOCK_TOKENS + 2))
        spec = RunSpec(1, tuple(ids), (Choice(index=0),), Sampling(seed=0, max_tokens=1))
        return Sequence(spec, 0, list(ids), blocks, arrival=0, then_decode=True)

    def step(self, *chunks: Chunk) -> Tensor:
        logits = self.llama.forward(build_batch(Step(chunks)), lambda: False)
        assert logits is not None
        for chunk in chunks:
            chunk.sequence.computed += chunk.count
        return logits

    def prefill(self, sequence: Sequence, upto: int) -> Tensor:
        return self.step(Chunk(sequence, sequence.computed, upto - sequence.computed, samples=True))[0]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_a_whole_prompt(model: tiny.Tiny, length: int) -> None:
    bench, ids = Bench(model), tiny.prompt(length, length)
    close(bench.prefill(bench.sequence(ids), length), model.logits(ids)[-1])


@pytest.mark.parametrize("chunk", [1, 7, 16, 31])
def test_a_prompt_in_chunks_gives_the_logits_of_each_prefix(model: tiny.Tiny, chunk: int) -> None:
    bench, ids = Bench(model), tiny.prompt(3, 75)
    expected, sequence = model.logits(ids), bench.sequence(ids)
    for upto in [*range(chunk, len(ids), chunk), len(ids)]:
        close(bench.prefill(sequence, upto), expected[upto - 1])


def test_decode_rows_of_different_lengths_beside_two_prefills(model: tiny.Tiny) -> None:
    bench = Bench(model)
    prompts = [tiny.prompt(seed, length + 6) for seed, length in enumerate([1, 15, 16, 17, 40, 130])]
    expected = [model.logits(ids) for ids in prompts]
    sequences = [bench.sequence(ids) for ids in prompts]
    for sequence in sequences:
        bench.prefill(sequence, len(sequence.ids) - 6)
    late = [bench.sequence(tiny.prompt(90 + i, 60)) for i in range(2)]
    for last in (False, False, False, False, False, True):
        rows = [Chunk(sequence, sequence.computed, 1, samples=True) for sequence in sequences]
        pieces = [Chunk(sequence, sequence.computed, 10, samples=last) for sequence in late]
        logits = bench.step(*rows[:3], pieces[0], *rows[3:], pieces[1])
        theirs = [logit[row.start] for row, logit in zip(rows, expected, strict=True)]
        if last:
            theirs.insert(3, model.logits(late[0].ids)[-1])
            theirs.append(model.logits(late[1].ids)[-1])
        close(logits, torch.stack(theirs))


def test_a_row_with_nan_in_its_kv_does_not_touch_its_batch_mates(gqa: tiny.Tiny) -> None:
    bench = Bench(gqa)
    short, long = (bench.sequence(tiny.prompt(seed, length)) for seed, length in ((1, 5), (2, 45)))
    bench.prefill(short, 4)
    bench.prefill(long, 44)
    bench.kv[list(long.blocks)] = float("nan")
    logits = bench.step(Chunk(short, 4, 1, samples=True), Chunk(long, 44, 1, samples=True))
    close(logits[0], gqa.logits(short.ids)[-1])
    assert logits[1].isnan().all()


def test_nothing_outside_the_sequences_blocks_is_written(gqa: tiny.Tiny) -> None:
    bench = Bench(gqa)
    sequence = bench.sequence(tiny.prompt(1, 33))
    bench.prefill(sequence, 33)
    used = set(sequence.blocks[:3])
    untouched = [block for block in range(BLOCKS) if block not in used]
    assert bench.kv[untouched].isnan().all()
    assert bench.kv[sequence.blocks[2], :, :, 1:].eq(0).all()


def test_cancelled_rows_stop_the_step_before_the_next_layer(gqa: tiny.Tiny) -> None:
    bench = Bench(gqa)
    sequence = bench.sequence(tiny.prompt(1, 33))
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == 2

    assert bench.llama.forward(build_batch(Step((Chunk(sequence, 0, 33, samples=True),))), cancelled) is None
    layers_written = bench.kv[sequence.blocks[0], :, 0, 0, 0, 0].isfinite()
    assert layers_written.tolist() == [True, False, False]
