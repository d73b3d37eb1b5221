"""The executor behind the double: iterations over requests and blocks, with what the 1.2 line does at its edges.

An abort looks at active requests only, so one after a context response does nothing; during a transfer it waits; a context
request's blocks stay in use until they are fetched or its timeout fires; there are no statistics and events before the first
request.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tests.engine.trtllm_engine.double import DisaggregatedParams, GenerationResult, RequestError, SamplingParams, World


@dataclass(eq=False)
class Request:
    """`done_at`: of the prompt's computation or the transfer; `handed`: since when its blocks wait to be fetched."""

    id: int
    kind: str
    prompt: list[int]
    params: SamplingParams
    streaming: bool
    given: DisaggregatedParams | None
    salt: str
    lora: Any
    result: GenerationResult
    submitted: float
    blocks: int = 0
    generated: list[int] = field(default_factory=list)
    done_at: float | None = None
    source: Any = None
    started: bool = False
    aborts: int | None = None
    handed: float = 0.0
    cached: int = 0
    opaque: bytes = b""


class Executor:
    """`fault`: what every request is told next, and then the engine shuts itself down. `stuck`: nothing is computed any more.

    `late_abort`: iterations until an abort is heeded.
    """

    def __init__(self, world: World, arguments: dict[str, Any]) -> None:
        self.world = world
        self.fault: Exception | None = None
        self.stuck = False
        self.late_abort = 0
        self.ended = False
        self.stats: deque[Any] = deque()
        self.events: deque[Any] = deque()
        kv, transceiver = arguments.get("kv_cache_config"), arguments.get("cache_transceiver_config")
        self.block_tokens = kv.tokens_per_block if kv else 32
        self._event_room = kv.event_buffer_max_size if kv and kv.enable_block_reuse else 0
        self._timeout = transceiver.kv_transfer_timeout_ms / 1000 if transceiver and transceiver.kv_transfer_timeout_ms else None
        self._transceives = bool(transceiver and transceiver.backend)
        self._overlap = not arguments.get("disable_overlap_scheduler")
        self._says_stats = bool(arguments.get("enable_iter_perf_stats"))
        self._most_tokens = arguments.get("max_num_tokens", 8192)
        self._chunked = bool(arguments.get("enable_chunked_prefill"))
        self._ids = 0
        self._event_ids = 0
        self.queue: list[Request] = []
        self.active: list[Request] = []
        self.in_transmission: list[Request] = []
        self._leaked = 0
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self.asked: list[Request] = []

    # what the API calls

    def submit(
        self, prompt: list[int], params: SamplingParams, streaming: bool, given: DisaggregatedParams | None, salt: str, lora: Any
    ) -> GenerationResult:
        kind = "context_and_generation" if given is None or given.request_type is None else given.request_type
        self._check(kind, prompt, given)
        self._ids += 1
        result = GenerationResult(self, self._ids, prompt)
        request = Request(self._ids, kind, prompt, params, streaming, given, salt, lora, result, time.monotonic())
        self.queue.append(request)
        self.asked.append(request)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return result

    def abort_request(self, request_id: int) -> None:
        for request in (*self.queue, *self.active):  # not those whose context response is out
            if request.id == request_id and request.aborts is None:
                request.aborts = self.late_abort

    def shutdown(self) -> None:
        self.ended = True
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    @property
    def used(self) -> int:
        return sum(r.blocks for r in (*self.active, *self.in_transmission)) + self._leaked

    # iterations

    def _check(self, kind: str, prompt: list[int], given: DisaggregatedParams | None) -> None:
        if kind != "context_and_generation" and not self._transceives:
            raise AssertionError("kv_cache_transceiver is disabled")
        if kind == "context_only" and self._overlap:
            raise ValueError("Context only requests are not supported in pytorch backend when overlap is enabled.")
        if kind != "generation_only" and len(prompt) > self._most_tokens and not self._chunked:
            raise ValueError("the prompt is longer than max_num_tokens")
        if kind == "generation_only":
            assert given is not None
            if not given.first_gen_tokens:
                self.shutdown()  # IndexError out of the executor's loop ends the rank
                raise IndexError("first_gen_tokens")

    async def _run(self) -> None:
        while not self.ended:
            await asyncio.sleep(self.world.step_s)
            if self.fault is not None:
                for request in (*self.queue, *self.active):
                    request.result.say(self.fault)
                return
            if not self.stuck and (self.queue or self.active):
                began = time.monotonic()
                context_tokens = self._iterate()
                self._say_stats(time.monotonic() - began + self.world.step_s, context_tokens)

    def _iterate(self) -> int:
        now = time.monotonic()
        self._cancel()
        scheduled = self._schedule(now)
        self._time_out(now, prompt_scheduled=scheduled > 0)
        for request in list(self.active):
            self._advance(request, now)
        return scheduled

    def _cancel(self) -> None:
        for request in [r for r in (*self.queue, *self.active) if r.aborts is not None]:
            assert request.aborts is not None
            transferring = request.kind == "generation_only" and request in self.active and not request.started
            if transferring:
                continue
            if request.aborts > 0:
                request.aborts -= 1
                continue
            self._finish(request, [], "cancelled")

    def _schedule(self, now: float) -> int:
        """Requests that fit into the pool begin, in order. How many prompt tokens begin with them."""
        tokens = 0
        while self.queue:
            request = self.queue[0]
            length = len(request.prompt) + (1 if request.kind == "context_only" else request.params.max_tokens)
            blocks = -(-length // self.block_tokens)
            if self.used + blocks > self.world.blocks:
                break
            self.queue.remove(request)
            self.active.append(request)
            request.blocks = blocks
            self._trim()
            if request.kind == "generation_only":
                self._fetch(request, now)
            else:
                request.cached = self._hit(request)
                request.done_at = now + self.world.prefill_s
                tokens += len(request.prompt) - request.cached
        return tokens

    def _fetch(self, request: Request, now: float) -> None:
        assert request.given is not None
        state = bytes(request.given.opaque_state or b"")
        self.world.consumed.append(state)
        request.source = self.world.handoffs.pop(state, None)
        request.done_at = now + self.world.transfer_s if request.source is not None else None  # None: it waits for ever

    def _time_out(self, now: float, *, prompt_scheduled: bool) -> None:
        if self._timeout is None:
            return
        if prompt_scheduled or not self.world.hole:
            for request in [r for r in self.in_transmission if now - r.handed > self._timeout]:
                self.in_transmission.remove(request)
                self.world.handoffs.pop(request.opaque, None)
                self._leaked += request.blocks if self.world.leak else 0
        for request in [r for r in self.active if r.kind == "generation_only" and not r.started]:
            if now - request.submitted > self._timeout:
                self.active.remove(request)
                request.result.say(RequestError(f"Request {request.id} timed out"))

    def _advance(self, request: Request, now: float) -> None:
        if request.done_at is None or now < request.done_at:
            return
        if request.kind == "context_only":
            self._answer_context(request, now)
            return
        if request.kind == "generation_only" and not request.started:
            assert request.given is not None
            sender, sent = request.source
            sender.fetched(sent)
            request.started, request.cached = True, len(request.prompt)
            token = (request.given.first_gen_tokens or [0])[0]
        else:
            request.started = True
            token = self.world.answer(request.prompt, request.generated)  # penalties and seeds change nothing
        request.generated.append(token)
        finish = self._ends(request, token)
        if finish:
            self._finish(request, [token], finish)
        elif request.streaming:
            request.result.say(([token], None, None, request.cached))

    def _answer_context(self, request: Request, now: float) -> None:
        token = self.world.answer(request.prompt, [])
        request.generated.append(token)
        if self._ends(request, token) == "stop":
            self._finish(request, [token], "stop")
            return
        self.active.remove(request)
        request.handed = now
        request.opaque = f"{id(self)}:{request.id}:{now}".encode()
        self.world.handoffs[request.opaque] = (self, request)
        self.in_transmission.append(request)
        params = DisaggregatedParams(
            request_type="context_only", first_gen_tokens=[token], ctx_request_id=request.id, opaque_state=request.opaque
        )
        request.result.say(([token], "not_finished", params, request.cached))

    def fetched(self, request: Request) -> None:
        """A peer has its blocks now."""
        if request in self.in_transmission:
            self.in_transmission.remove(request)
            self._store(request)

    def _ends(self, request: Request, token: int) -> str | None:
        stops = {*(request.params.stop_token_ids or ()), *(() if request.params.ignore_eos else (request.params.end_id,))}
        if token in stops:
            return "stop"
        return "length" if len(request.generated) >= request.params.max_tokens else None

    def _finish(self, request: Request, new: list[int], reason: str) -> None:
        if request in self.queue:
            self.queue.remove(request)
        if request in self.active:
            self.active.remove(request)
            self._store(request)
        told = new if request.streaming else request.generated
        request.result.say((list(told), reason, None, request.cached))

    # block reuse

    def _hashes(self, request: Request, ids: list[int]) -> list[tuple[int, list[int]]]:
        full = range(0, len(ids) - self.block_tokens + 1, self.block_tokens)
        adapter = request.lora.lora_int_id if request.lora else 0
        path = [(request.salt, adapter, ids[: start + self.block_tokens]) for start in full]
        names = [int.from_bytes(blake2b(repr(item).encode(), digest_size=8).digest(), "big") for item in path]
        return [(name, ids[start : start + self.block_tokens]) for name, start in zip(names, full, strict=True)]

    def _hit(self, request: Request) -> int:
        hits = 0
        for name, _ in self._hashes(request, request.prompt[:-1]):
            if name not in self._cache:
                break
            hits += 1
        return hits * self.block_tokens

    def _store(self, request: Request) -> None:
        if not self._event_room:
            return
        parent: int | None = None
        for name, tokens in self._hashes(request, [*request.prompt, *request.generated[:-1]]):
            if name not in self._cache:
                block = {
                    "type": "stored_block",
                    "block_hash": name,
                    "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                    "cache_level": 0,
                    "priority": 35,
                }
                self._say_event({"type": "stored", "parent_hash": parent, "blocks": [block]})
            self._cache[name] = None
            self._cache.move_to_end(name)
            parent = name
        self._trim()

    def _trim(self) -> None:
        while len(self._cache) > max(0, self.world.blocks - self.used):
            name, _ = self._cache.popitem(last=False)
            self._say_event({"type": "removed", "block_hashes": [name]})

    # what it says

    def _say_event(self, data: dict[str, Any]) -> None:
        if self._event_ids == 0:
            self._put_event({"type": "created", "num_blocks_per_cache_level": [self.world.blocks, 0]})
        if self.world.drop_events:
            self.world.drop_events -= 1
            self._event_ids += 1
            return
        self._put_event(data)

    def _put_event(self, data: dict[str, Any]) -> None:
        self.events.append({"event_id": self._event_ids, "data": data, "window_size": 4096})
        self._event_ids += 1
        while len(self.events) > self._event_room:
            self.events.popleft()  # the buffer is bounded, and drops

    def _say_stats(self, seconds: float, context_tokens: int) -> None:
        if not self._says_stats:
            return
        self.stats.append(
            {
                "timestamp": "",
                "iter": len(self.asked),
                "iterLatencyMS": seconds * 1000,
                "numActiveRequests": len(self.active),
                "numQueuedRequests": len(self.queue),
                "maxNumActiveRequests": 64,
                "kvCacheStats": {
                    "maxNumBlocks": self.world.blocks,
                    "freeNumBlocks": self.world.blocks - self.used,
                    "usedNumBlocks": self.used,
                    "tokensPerBlock": self.block_tokens,
                    "allocTotalBlocks": 0,
                    "allocNewBlocks": 0,
                    "reusedBlocks": 0,
                    "missedBlocks": 0,
                    "cacheHitRate": 0.0,
                },
                "inflightBatchingStats": {
                    "numScheduledRequests": len(self.active),
                    "numContextRequests": 0,
                    "numGenRequests": len(self.active),
                    "numPausedRequests": 0,
                    "numCtxTokens": context_tokens,
                    "microBatchId": 0,
                    "avgNumDecodedTokensPerIter": 0.0,
                },
            }
        )
