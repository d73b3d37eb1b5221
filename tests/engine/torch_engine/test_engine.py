"""The whole torch engine on tiny models: its tokens are transformers', alone, batched, handed off, resumed, preempted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from schemas.job import Choice, Sampling, Tier
from schemas.lifecycle import State
from services.engine.protocol import RunSpec
from services.engine.torch_engine.model import Llama
from services.kv.holders import RunHolder
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running, copy_blocks
from tests.waiting import until


def spec(run: int, prompt: list[int], *, generated: tuple[int, ...] = (), tier: Tier = Tier.PAID, **sampling: Any) -> RunSpec:
    settings = Sampling(**{"seed": 5, "max_tokens": 24, "temperature": 0.0} | sampling)
    return RunSpec(run, tuple(prompt), (Choice(index=0, generated=generated),), settings, tier)


PROMPTS = [tiny.prompt(40 + length, length) for length in (1, 5, 16, 31, 64, 100, 150)]


async def test_greedy_tokens_are_those_of_transformers(model: tiny.Tiny) -> None:
    async with Running(tiny.engine(model.files, step_tokens=48)) as running:
        for run, prompt in enumerate(PROMPTS):
            assert await running.generate(spec(run, prompt)) == [model.greedy(prompt, 24)]


async def test_a_full_batch_gets_the_tokens_each_gets_alone(model: tiny.Tiny) -> None:
    async with Running(tiny.engine(model.files, step_tokens=32, kv_blocks=96)) as running:
        together = await running.generate(*(spec(run, prompt) for run, prompt in enumerate(PROMPTS)))
    assert together == [model.greedy(prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("length", [15, 16, 17, 90])
async def test_a_handoff_changes_no_token(gqa: tiny.Tiny, length: int, temperature: float) -> None:
    prompt = tiny.prompt(length, length)
    kind = {"temperature": temperature, "ignore_eos": True}
    here, there = tiny.engine(gqa.files), tiny.engine(gqa.files)
    used = there.pool.allocate(RunHolder(99), 10)  # so that the blocks lie elsewhere
    async with Running(here) as prefill, Running(there) as decode:
        (local,) = await prefill.generate(spec(1, prompt, **kind))
        here.prefill(spec(2, prompt, **kind))
        first = await prefill.prefilled(2)
        into = copy_blocks(here, there, 2)
        assert not set(into) & set(used)
        there.decode(spec(2, prompt, **kind), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        assert [first.token, *decode.tokens(2)] == local
        there.pool.release(RunHolder(99))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_resume_goes_on_with_the_same_tokens(gqa: tiny.Tiny, temperature: float) -> None:
    prompt, kind = tiny.prompt(8, 20), {"temperature": temperature, "ignore_eos": True}
    async with Running(tiny.engine(gqa.files)) as running:
        (whole,) = await running.generate(spec(1, prompt, **kind))
        for run, done in enumerate((1, 7, 23), start=2):
            (rest,) = await running.generate(spec(run, prompt, generated=tuple(whole[:done]), **kind))
            assert whole[:done] + rest == whole


async def test_sampling_follows_the_seed_and_reports_logprobs(gqa: tiny.Tiny) -> None:
    prompt = tiny.prompt(8, 20)
    async with Running(tiny.engine(gqa.files)) as running:
        one, again, other = await running.generate(
            spec(1, prompt, temperature=1.0, logprobs=3),
            spec(2, prompt, temperature=1.0),
            spec(3, prompt, temperature=1.0, seed=6),
        )
        assert one == again != other
        logprobs = [output.logprob for output in running.outputs(1)]
    expected = torch.log_softmax(gqa.logits(prompt + one), dim=-1)
    for position, (token, said) in enumerate(zip(one, logprobs, strict=True)):
        row = expected[len(prompt) - 1 + position]
        assert said is not None
        assert said.token == token
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [best for best, _ in said.top] == row.topk(3).indices.tolist()


async def test_no_end_of_sequence_before_min_tokens(gqa: tiny.Tiny) -> None:
    async with Running(tiny.engine(gqa.files)) as running:
        (plain,) = await running.generate(spec(1, PROMPTS[3]))
        (longer,) = await running.generate(spec(2, PROMPTS[3], stop_token_ids=(plain[2],), min_tokens=10))
        (short,) = await running.generate(spec(3, PROMPTS[3], stop_token_ids=(plain[2],)))
    assert short == plain[: plain.index(plain[2]) + 1]
    assert len(longer) > 10
    assert plain[2] not in longer[:10]


class Gate:
    """Stops the computing thread at its first look for cancelled rows after layer `layer`, until `open`."""

    def __init__(self, layer: int) -> None:
        self.looks = 0
        self.reached = threading.Event()
        self.open = threading.Event()
        self._layer = layer

    def around(self, forward: Any) -> Any:
        def gated(model: Llama, batch: Any, cancelled: Any) -> Any:
            def look() -> bool:
                self.looks += 1
                if self.looks == self._layer:
                    self.reached.set()
                    self.open.wait(30)
                return bool(cancelled())

            return forward(model, batch, look)

        return gated


async def test_a_cancel_stops_a_long_prefill_at_the_next_layer(gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(layer=2)
    monkeypatch.setattr(Llama, "forward", gate.around(Llama.forward))
    engine = tiny.engine(gqa.files, step_tokens=200)
    async with Running(engine) as running:
        engine.prefill(spec(1, tiny.prompt(1, 200)))
        await until(gate.reached.is_set)
        engine.cancel(1)
        assert len(engine.pool.blocks(RunHolder(1))) == 13, "the thread may still write there"
        gate.open.set()
        await running.ended(1)
        end = running.end(1)
        assert end is not None
        assert end.state is State.CANCELLED
        assert gate.looks == 2, "a layer was computed after the cancel"
        assert engine.stats().steps == 0
        assert engine.pool.held == 0


async def test_stop_waits_for_the_thread(gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(layer=2)
    monkeypatch.setattr(Llama, "forward", gate.around(Llama.forward))
    engine = tiny.engine(gqa.files, step_tokens=200)
    async with Running(engine):
        engine.prefill(spec(1, tiny.prompt(1, 200)))
        await until(gate.reached.is_set)
        threading.Timer(0.1, gate.open.set).start()
        await engine.stop()
        assert gate.open.is_set()
        assert gate.looks == 2
        assert engine.pool.held == 0


@pytest.mark.parametrize("swap_mb", [0, 1])
async def test_a_pool_that_runs_out_preempts_and_all_others_are_right(gqa: tiny.Tiny, swap_mb: int) -> None:
    """Who is preempted comes back, if there is a swap space."""
    prompts = [tiny.prompt(seed, 240) for seed in range(5)]
    engine = tiny.engine(gqa.files, kv_blocks=16 * 4 + 15, kv_swap_mb=swap_mb)
    async with Running(engine) as running:
        for run, prompt in enumerate(prompts):
            tier = Tier.FREE if run == 2 else Tier.PAID
            engine.prefill(spec(run, prompt[: 239 - run], tier=tier, max_tokens=100), then_decode=True)
        await running.ended(*range(5))
        ends = [running.end(run) for run in range(5)]
    preempted = State.FINISHED if swap_mb else State.RETRY
    assert sum(report.preemptions for report in running.reports) == 1
    assert [end.state for end in ends if end] == [State.FINISHED] * 2 + [preempted] + [State.FINISHED] * 2
    for run in range(5) if swap_mb else (0, 1, 3, 4):
        expected = gqa.greedy(prompts[run][: 239 - run], tiny.CONTEXT - (239 - run))
        assert running.tokens(run) == expected


async def test_a_row_whose_kv_is_broken_fails_alone(gqa: tiny.Tiny) -> None:
    here, there = tiny.engine(gqa.files), tiny.engine(gqa.files)
    good, bad = spec(1, PROMPTS[3]), spec(2, PROMPTS[4])
    async with Running(here) as prefill, Running(there) as decode:
        firsts = []
        for each in (good, bad):
            here.prefill(each)
            firsts.append(await prefill.prefilled(each.run))
            copy_blocks(here, there, each.run)
        there.pool.view(there.pool.blocks(RunHolder(2))[0])[:] = b"\xff" * there.pool.block_bytes
        there.decode(good, (firsts[0],), cached_tokens=0, compute_s=0.0)
        there.decode(bad, (firsts[1],), cached_tokens=0, compute_s=0.0)
        await decode.ended(1, 2)
        end = decode.end(2)
        assert end is not None
        assert end.state is State.FAILED
        assert [firsts[0].token, *decode.tokens(1)] == gqa.greedy(PROMPTS[3], 24)
        (reused,) = await decode.generate(spec(3, PROMPTS[5]))  # its blocks held NaN a moment ago
        assert reused == gqa.greedy(PROMPTS[5], 24)
