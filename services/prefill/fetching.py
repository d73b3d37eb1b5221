"""Cached KV blocks of a prompt, fetched from the decode worker that has them instead of being computed here.

Owns: when that is worth a try, how long it may take, and how fast it was. Must not know what becomes of the run. Invariant: a
block is shared only after its release was answered *ok*; whatever fails costs time, and the prompt is computed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from schemas.errors import BusError, UnreadableMessage
from schemas.handoff import Offer, OfferRequest
from schemas.placement import CachedBlocks
from services.bus.typed import ask
from services.engine.protocol import RunSpec
from services.kv.hashing import cap_hit
from services.kv.holders import RunHolder
from services.kv.transfer.interface import TransferClient, TransferError
from services.worker.worker import Worker

OFFER_ANSWER_S = 0.3
LEAST_S = 0.5
BYTES_S = 500e6
"""A network that carries less is seldom faster than computing."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of a run's prompt that `process` is said to have: `hashes` from the first one on; `here` are cached here."""

    process: str
    hashes: tuple[bytes, ...]
    here: tuple[int, ...]


def time_limit(size: int) -> float:
    """Seconds that `size` bytes may take, from the offer's arrival to the answer to their release."""
    return LEAST_S + size / BYTES_S


_WEIGHT = 0.2
"""Of the newest fetch in the measured rate."""


class Fetching:
    """Says to routers what it can: `worker.beats.fetch_tokens_s`, at first by what a network should carry."""

    def __init__(self, worker: Worker, transfer: TransferClient) -> None:
        self._worker = worker
        self._transfer = transfer
        if block := worker.engine.pool.block_bytes:
            worker.beats.fetch_tokens_s = BYTES_S / block * worker.engine.info.block_tokens

    def wanted(self, spec: RunSpec, cached: CachedBlocks | None) -> Wanted | None:
        """None: nothing is to be had that the prompt's computation could use and that is not here."""
        pool, info = self._worker.engine.pool, self._worker.engine.info
        if cached is None or cached.process == self._worker.bus.process or spec.sampling.prompt_logprobs is not None:
            return None
        if not pool.block_bytes:
            return None  # the engine keeps its blocks itself
        most = min(cached.blocks, cap_hit(len(spec.trunk), info.block_tokens))
        hashes = spec.hashes(info)[:most]
        here = pool.prefix.match(hashes)
        return Wanted(cached.process, tuple(hashes), tuple(here)) if len(here) < most else None

    def claim(self, spec: RunSpec, wanted: Wanted) -> None:
        """The run holds what is here, and room for the rest of its prompt. Raises PoolExhausted; then nothing was changed."""
        blocks = -(-len(spec.trunk) // self._worker.engine.info.block_tokens)
        self._worker.engine.pool.claim(RunHolder(spec.run), blocks, wanted.here)

    async def fetch(self, run: int, wanted: Wanted, within: float) -> None:
        """Bring what can be had in `within` seconds into the prefix cache. When this ends, nothing writes to the run's blocks."""
        try:
            async with asyncio.timeout(within):
                outcome = await self._fetch(run, wanted)
        except (BusError, UnreadableMessage, TransferError) as error:
            outcome = error.code or "failed"
        except TimeoutError:
            outcome = "timeout"
        if outcome != "fetched":
            _log.info("run %d computes what %s was said to have: %s", run, wanted.process, outcome)
        self._worker.metrics.kv_fetches.add(1, {"outcome": outcome})

    async def _fetch(self, run: int, wanted: Wanted) -> str:
        worker, pool = self._worker, self._worker.engine.pool
        have, kv_compat = len(wanted.here), worker.engine.info.kv_compat
        began = worker.clock.monotonic()
        request = OfferRequest(run=run, kv_compat=kv_compat, hashes=wanted.hashes, have=have)
        subject = worker.subjects.decode_offer(wanted.process)
        offer = await ask(worker.bus, subject, request, Offer, timeout=OFFER_ANSWER_S)
        if offer.ticket is None:
            return "refused"
        end = len(offer.blocks)
        names = wanted.hashes[:end]
        if not have < end or tuple(block.hash for block in offer.blocks) != names:
            return "other_blocks"
        blocks = pool.blocks(RunHolder(run))[have:end]
        into = [pool.view(block) for block in blocks]
        limit = time_limit(len(blocks) * pool.block_bytes)
        async with asyncio.timeout(limit):
            fetched = await self._transfer.fetch(offer.ticket, offer.blocks[have:], into, kv_compat=kv_compat, timeout=limit)
            async with fetched:
                if not await fetched.release():
                    return "expired"
        await pool.stage_in(blocks)
        pool.seal(RunHolder(run), blocks, names[have:])
        worker.metrics.kv_blocks_fetched.add(len(blocks))
        self._observe(len(blocks), worker.clock.monotonic() - began)
        return "fetched"

    def _observe(self, blocks: int, seconds: float) -> None:
        if seconds > 0:
            beats, tokens = self._worker.beats, blocks * self._worker.engine.info.block_tokens
            beats.fetch_tokens_s = (1 - _WEIGHT) * beats.fetch_tokens_s + _WEIGHT * tokens / seconds
