"""The router places by what is cached where: what it just placed, what workers say, what decode could lend."""

from __future__ import annotations

import msgspec
import pytest

from schemas.job import Job
from schemas.kvevents import KvEvents
from schemas.placement import Accepted, CachedBlocks
from schemas.state import Credits, Rates, Role
from services.bus.typed import send
from services.kv.hashing import block_hashes, chain_root
from services.router.prefix_index import PrefixIndex
from services.router.prompt import Prompt
from tests.router.fakes import MODEL, SUBJECTS, FakeWorker, a_job, a_state
from tests.router.harness import House
from tests.waiting import until

BLOCK = 16


def chain(job: Job, ids: range | None = None) -> list[bytes]:
    """As a worker names the blocks of the prompt."""
    return block_hashes(list(ids or range(job.prompt_tokens)), BLOCK, chain_root("kv", job.salt, job.adapter))


def test_the_router_names_blocks_as_workers_do() -> None:
    job = a_job(tokens=50, generated=(7,) * 20, resume=True)
    trunk = [*range(50), *(7,) * 20]
    assert list(Prompt(job).chain("kv", BLOCK)) == block_hashes(trunk, BLOCK, chain_root("kv", b""))
    salted = msgspec.structs.replace(job, salt=b"another tenant")
    assert set(Prompt(salted).chain("kv", BLOCK)).isdisjoint(Prompt(job).chain("kv", BLOCK))


def test_a_prompt_is_hashed_as_far_as_somebody_has_it() -> None:
    index, job = PrefixIndex(), a_job(tokens=1600)
    index.stored("p1", chain(job)[:3])
    prompt = Prompt(job)
    names = prompt.chain("kv", BLOCK)
    assert index.hits(names) == {"p1": 3}
    assert len(names._known) == 4
    assert index.hits(names) == {"p1": 3}, "it can be walked again"


async def test_siblings_in_a_burst_meet_at_one_worker(house: House) -> None:
    await house.workers(Role.PREFILL, Role.PREFILL, Role.DECODE)
    answers = [await house.submit(a_job(tokens=320)) for _ in range(4)]
    assert all(isinstance(answer, Accepted) for answer in answers)
    assert len({answer.prefill for answer in answers if isinstance(answer, Accepted)}) == 1


async def test_a_prompt_goes_where_events_say_that_it_is_cached(house: House) -> None:
    first, second, _ = await house.workers(Role.PREFILL, Role.PREFILL, Role.DECODE, slots=16)
    index = house.routers[0].index
    for number in range(6):
        holder = (first, second)[number % 2]
        job = msgspec.structs.replace(a_job(tokens=160), salt=b"tenant %d" % number)
        stored = tuple(chain(job))
        send(
            holder.bus, SUBJECTS.kv_events(holder.process), KvEvents(process=holder.process, first=number // 2 + 1, stored=stored)
        )
        await until(lambda stored=stored: index.hits(stored) != {})  # type: ignore[misc]
        answer = await house.submit(job)
        assert isinstance(answer, Accepted)
        assert answer.prefill == holder.process


async def test_who_is_gone_has_nothing(house: House) -> None:
    first, *_ = await house.workers(Role.PREFILL, Role.PREFILL, Role.DECODE)
    stored = tuple(chain(a_job(tokens=320)))
    send(first.bus, SUBJECTS.kv_events(first.process), KvEvents(process=first.process, first=1, stored=stored))
    router = house.routers[0]
    await until(lambda: router.index.hits(stored) != {})
    router.feed.forget(first.process)
    assert router.index.hits(stored) == {}


@pytest.mark.parametrize(("fetch_tokens_s", "fetches"), [(0.0, False), (50_000.0, True)])
async def test_prefill_is_told_to_fetch_what_decode_has_when_that_is_faster(
    house: House, fetch_tokens_s: float, fetches: bool
) -> None:
    prefill, decode = await house.workers(Role.PREFILL, Role.DECODE, beats=False)
    _publishes(prefill, Rates(prefill_tokens_s=1000.0, fetch_tokens_s=fetch_tokens_s))
    job = a_job(tokens=800)
    stored = tuple(chain(job)[:40])
    send(decode.bus, SUBJECTS.kv_events(decode.process), KvEvents(process=decode.process, first=1, stored=stored))
    router = house.routers[0]
    await until(lambda: router.index.hits(stored) != {} and any(w.token_s for w in router.view.workers(MODEL)))
    assert isinstance(await house.submit(job), Accepted)
    [placement] = prefill.placed
    assert placement.fetch == (CachedBlocks(process=decode.process, blocks=40) if fetches else None)


def _publishes(worker: FakeWorker, rates: Rates) -> None:
    credits = Credits(version=next(worker.versions), prefill_tokens=512, decode_slots=4, kv_blocks=100)
    state = a_state(worker.process, worker.role, rates=rates, credits=credits)
    send(worker.bus, SUBJECTS.worker_state(worker.role, MODEL, worker.process), state)
