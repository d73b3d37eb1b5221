"""Another precision, a pool beside the host's memory, another device: everything of the GPU path that a CPU can run."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from schemas.handoff import BlockRef
from schemas.job import Choice, Sampling
from services.clock import SystemClock
from services.engine.core import StepEngine
from services.engine.host import has_gpu_driver
from services.engine.protocol import RunSpec
from services.engine.scheduler import Chunk, Step
from services.engine.torch_engine import build as build_module
from services.engine.torch_engine import memory, pure
from services.engine.torch_engine.batch import build_batch
from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.device import CPU, Place, choose
from services.engine.torch_engine.pool_size import Room
from services.engine.torch_engine.staged import StagedPool
from services.kv import memory as kv_memory
from services.kv.holders import HandoffHolder, RunHolder, StagingHolder
from services.kv.transfer.auto import TransferKind, open_carriers, transfer_client
from services.kv.transfer.server import SocketTransferServer
from services.settings.errors import SettingsError
from services.settings.worker import WorkerSettings
from tests.engine.torch_engine import tiny
from tests.engine.torch_engine.rig import Running
from tests.engine.torch_engine.test_engine import PROMPTS, spec
from tests.engine.torch_engine.test_model import Bench
from tests.waiting import PATIENCE_S, until

BF16 = Place(CPU.device, torch.bfloat16)


def placed(model: tiny.Tiny, monkeypatch: pytest.MonkeyPatch, place: Place, **settings: object) -> StepEngine:
    """An engine as `build` makes it, at `place`."""
    monkeypatch.setattr(pure, "choose", lambda _: place)
    return tiny.engine(model.files, **settings)


def reference(model: tiny.Tiny, dtype: torch.dtype) -> tiny.Tiny:
    """The same weights in transformers, in another precision."""
    loaded = type(model.reference).from_pretrained(model.files.folder, dtype=dtype).eval()
    return tiny.Tiny(model.files, loaded)


def test_in_bfloat16_logits_are_as_near_to_exact_ones_as_those_of_transformers(model: tiny.Tiny) -> None:
    theirs, ids = reference(model, torch.bfloat16), tiny.prompt(4, 90)
    exact, rounded = model.logits(ids), theirs.logits(ids).float()
    bench = Bench(model, BF16)
    sequence = bench.sequence(ids)
    bench.prefill(sequence, 40)
    ours = bench.prefill(sequence, 90).float()
    assert bench.kv.dtype == torch.bfloat16
    assert (ours - exact[-1]).abs().max() <= 2 * (rounded[-1] - exact[-1]).abs().max() + 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_in_bfloat16_a_batch_gets_what_transformers_finds_likely(
    gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Two tokens that are nearly equally likely may change places; never two that differ by more than the rounding."""
    async with Running(placed(gqa, monkeypatch, BF16, kv_blocks=96)) as running:
        made = await running.generate(*(spec(run, prompt, temperature=temperature) for run, prompt in enumerate(PROMPTS)))
    assert all(len(tokens) == 24 or tokens[-1] == tiny.EOS for tokens in made)
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        logits = gqa.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if temperature == 0.0:
            assert behind.max() < 0.3, "the likeliest, as far as this precision can tell"


def test_a_batch_moves_to_its_device_as_a_whole(gqa: tiny.Tiny) -> None:
    bench = Bench(gqa)
    long, short = bench.sequence(tiny.prompt(1, 40)), bench.sequence(tiny.prompt(2, 9))
    bench.prefill(short, 8)
    batch = build_batch(Step((Chunk(long, 0, 40, samples=True), Chunk(short, 8, 1, samples=True))))
    assert batch.to(CPU.device) is batch
    there = batch.to(torch.device("meta"))
    tensors = [there.ids, there.positions, there.blocks, there.offsets, there.sampled, there.fresh]
    tensors += [part.mask(torch.bfloat16) for part in there.parts]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len(there.parts) == 2


# a pool that no transfer can read


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_handoff_through_the_hosts_copy_changes_no_token(
    gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch, kind: TransferKind, dtype: torch.dtype
) -> None:
    staged, prompt = Place(CPU.device, dtype, staged=True), PROMPTS[5]
    here, there = (placed(gqa, monkeypatch, staged) for _ in range(2))
    async with Running(here) as prefill, Running(there) as decode:
        (local,) = await prefill.generate(spec(1, prompt))
        here.prefill(spec(2, prompt))
        first = await prefill.prefilled(2)
        await hand_over(here, there, 2, kind)
        there.decode(spec(2, prompt), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        assert [first.token, *decode.tokens(2)] == local
        assert here.pool.held == there.pool.held == 0


async def hand_over(here: StepEngine, there: StepEngine, run: int, kind: TransferKind) -> None:
    """As two workers do it, without the bus."""
    holder, compat = HandoffHolder(run), here.info.kv_compat
    here.pool.transfer(RunHolder(run), holder, expires=SystemClock().monotonic() + 2)
    server, client = SocketTransferServer(here.pool, clock=SystemClock()), transfer_client(kind)
    await server.start("127.0.0.1", 0)
    await open_carriers(server, kind)
    blocks = here.pool.blocks(holder)
    into = there.pool.allocate(RunHolder(run), len(blocks))
    refs = [BlockRef(slot=block, generation=here.pool.generation(block)) for block in blocks]
    ticket = server.offer(holder, kv_compat=compat, on_done=lambda *_: None)
    views = [there.pool.view(block) for block in into]
    async with await client.fetch(ticket, refs, views, kv_compat=compat, timeout=PATIENCE_S) as fetched:
        assert await fetched.release()
    await there.pool.stage_in(into)
    client.close()
    await server.close()


async def test_preempted_runs_come_back_to_a_staged_pool(gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Place(CPU.device, torch.float32, staged=True)
    prompts = [tiny.prompt(seed, 230) for seed in range(5)]
    async with Running(placed(gqa, monkeypatch, staged, kv_blocks=16 * 4 + 15, kv_swap_mb=1)) as running:
        made = await running.generate(*(spec(run, prompt, max_tokens=26) for run, prompt in enumerate(prompts)))
        assert sum(report.preemptions for report in running.reports) > 0
    assert made == [gqa.greedy(prompt, 26) for prompt in prompts]


async def test_choices_and_hits_work_on_a_staged_pool(gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices copy their tails on the device."""
    sampling = Sampling(seed=5, max_tokens=12, temperature=1.0)
    choices = tuple(Choice(index=index) for index in range(3))

    async def made(place: Place) -> list[list[int]]:
        async with Running(placed(gqa, monkeypatch, place)) as running:
            for run in (1, 2):
                running.engine.prefill(RunSpec(run, tuple(PROMPTS[4]), choices, sampling), then_decode=True)
                await running.ended(run)
            outputs = running.outputs(1) + running.outputs(2)
            assert running.outputs(2)[0].cached_tokens == 48
            return [[o.token for o in outputs if (o.run, o.choice) == (run, choice)] for run in (1, 2) for choice in range(3)]

    assert await made(Place(CPU.device, torch.float32, staged=True)) == await made(CPU)


def staged_pool(blocks: int = 256) -> tuple[torch.Tensor, StagedPool]:
    tensor = torch.zeros((blocks, 2, 8), dtype=torch.bfloat16)
    own = kv_memory.allocate(blocks * 32)
    return tensor, StagedPool(tensor, block_bytes=32, memory=own.view, fd=own.fd)


async def test_blocks_go_out_and_come_in() -> None:
    tensor, pool = staged_pool()
    blocks = pool.allocate(RunHolder(1), 5)
    tensor.view(torch.int16).random_()
    assert not any(pool.view(blocks[2]))
    await pool.stage_out(blocks)
    for block in blocks:
        assert bytes(pool.view(block)) == tensor[block].view(torch.uint8).numpy().tobytes() == pool.read(block)
    pool.view(blocks[0])[:] = bytes(range(32))
    await pool.stage_in(blocks[:1])
    assert pool.read(blocks[0]) == bytes(range(32))
    pool.copy(blocks[0], blocks[1])
    pool.write(blocks[2], pool.read(blocks[1]))
    assert torch.equal(tensor[blocks[2]].view(torch.int16), tensor[blocks[0]].view(torch.int16))
    pool.check_integrity()
    assert pool.holders == (RunHolder(1),)


async def test_a_block_goes_out_once_a_generation() -> None:
    tensor, pool = staged_pool()
    blocks = pool.allocate(RunHolder(1), 2)
    await pool.stage_out(blocks)
    digest = pool.checksum(blocks[0])
    tensor[blocks[0]] = 7.0
    tensor[blocks[1]] = 7.0
    await pool.stage_out(blocks)
    assert not any(pool.view(blocks[0])), "it was full, so it cannot have changed"
    assert any(pool.view(blocks[1])), "nobody took its checksum yet"
    pool.release(RunHolder(1))
    again = pool.allocate(RunHolder(2), pool.total)
    await pool.stage_out(again)
    assert pool.checksum(blocks[0]) != digest


async def test_blocks_are_held_while_they_are_copied_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    download = StagedPool._download
    monkeypatch.setattr(StagedPool, "_download", lambda self, blocks: (go.wait(10), download(self, blocks))[1])
    _, pool = staged_pool()
    blocks = pool.allocate(RunHolder(1), 3)
    waiting = asyncio.create_task(pool.stage_out(blocks))
    await asyncio.sleep(0)
    waiting.cancel()
    pool.release(RunHolder(1))
    assert [type(holder) for holder in pool.holders] == [StagingHolder]
    assert not set(blocks) & set(pool.allocate(RunHolder(2), pool.free))
    go.set()
    await until(lambda: pool.holders == (RunHolder(2),))
    pool.check_integrity()


# what is chosen


def test_what_the_settings_choose_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(WorkerSettings()) == CPU
    assert choose(WorkerSettings(dtype="bfloat16")) == BF16
    with pytest.raises(SettingsError, match=r"worker\.device.*no CUDA device"):
        choose(WorkerSettings(device="cuda"))


def test_what_the_settings_choose_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = choose(WorkerSettings())
    assert (gpu.device.type, gpu.dtype, gpu.staged, gpu.numerics) == ("cuda", torch.bfloat16, True, "bfloat16 cuda")
    assert choose(WorkerSettings(device="cuda", dtype="float32")).dtype == torch.float32
    assert choose(WorkerSettings(device="cpu")) == CPU


@pytest.mark.parametrize(
    ("settings", "driver", "gpu", "torch_computes"),
    [
        (WorkerSettings(), False, False, False),
        (WorkerSettings(), True, False, False),
        (WorkerSettings(), True, True, True),
        (WorkerSettings(device="cpu"), True, True, False),
        (WorkerSettings(device="cuda"), False, False, True),
        (WorkerSettings(dtype="float32"), False, False, True),
    ],
)
def test_who_computes(
    monkeypatch: pytest.MonkeyPatch, settings: WorkerSettings, driver: bool, gpu: bool, torch_computes: bool
) -> None:
    monkeypatch.setattr(build_module, "has_gpu_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert build_module._computes_in_torch(settings) is torch_computes


def test_a_gpu_is_looked_for_where_its_driver_is(tmp_path: Path) -> None:
    assert not has_gpu_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_gpu_driver(tmp_path)


def test_a_gpus_free_memory_sizes_its_pool_and_the_hosts_limits_it(monkeypatch: pytest.MonkeyPatch, gqa: tiny.Tiny) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 16 * 2**30))
    room = Place(torch.device("cuda"), torch.bfloat16, staged=True).room(weights=2 * 2**30)
    assert (room.available, room.own, room.fraction) == (10 * 2**30, 2 * 2**30, 0.8)
    config = load_config(gqa.files.config)
    small = Room(2**22, fraction=0.8, most=2**20)
    pool = memory.allocate(config, WorkerSettings(), small, place=Place(CPU.device, torch.bfloat16, staged=True)).pool
    assert pool.total * pool.block_bytes <= 2**20


def test_blocks_of_other_precisions_are_of_another_kind(gqa: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {placed(gqa, monkeypatch, place).info.kv_compat for place in (CPU, BF16)}
    assert len(kinds) == 2
    staged = placed(gqa, monkeypatch, Place(CPU.device, torch.float32, staged=True))
    assert staged.info.kv_compat in kinds, "where the bytes lie does not matter"
