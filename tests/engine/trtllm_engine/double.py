"""A double of TensorRT-LLM 1.2.1's public API: its signatures (checked against the contract) and its awkward ways.

Ours alone, written from the recorded facts. `World` holds what one test wants of it. `api(world)` is what the adapter is given in
the place of the package.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from services.engine.trtllm_engine.api import Api
from services.engine.trtllm_engine.contract import SPECULATIVE, VERSION
from tests.engine.trtllm_engine import configurations

EOS = 0
VOCAB = 300


class RequestError(RuntimeError):
    """One request failed, the engine goes on."""


class EngineFault(Exception):
    """What a broken engine raises: nobody knows its type in advance."""


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: Any = None
    multimodal_hashes: Any = None
    mrope_position_ids_handle: Any = None
    mrope_position_deltas_handle: Any = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
                raise ValueError(f"Unknown request type: {self.request_type}")

    def get_context_phase_params(self) -> Any:
        raise NotImplementedError

    def get_request_type(self) -> Any:
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: Any = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: Any = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    beam_width_array: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    return_perf_metrics: bool = False
    additional_model_outputs: Any = None
    lookahead_config: Any = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError("top_p")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError("top_k")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError("temperature")


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: Any = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32


@dataclass(kw_only=True)
class CacheTransceiverConfig:
    backend: str | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None
    kv_transfer_sender_future_timeout_ms: int = 1000


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Any = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: Any = None
    additional_generation_outputs: Any = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def text_diff(self) -> str:
        return ""

    @property
    def token_ids_diff(self) -> list[int]:
        return []

    @property
    def logprobs_diff(self) -> list[Any]:
        return []


@dataclass(slots=True)
class World:
    """What a test wants of the engines in it, and the transceiver that they share. Times in seconds.

    `hole`: handoffs that nobody fetched are freed only in an iteration that schedules a prompt (PR 12313).
    `leak`: and then their blocks stay in use all the same.
    `answer`: the next token of (prompt, generated). `drop_events`: so many KV events are lost before the next one.
    `refuse`: what `generate_async` raises. `strip_stop`: a stop token is taken out of the list again.
    """

    blocks: int = 64
    step_s: float = 0.005
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    hole: bool = True
    leak: bool = False
    answer: Callable[[Sequence[int], Sequence[int]], int] = lambda prompt, generated: drawn(prompt, generated)
    drop_events: int = 0
    shutdown_s: float = 0.0
    refuse: Exception | None = None
    strip_stop: bool = False
    engines: list[Any] = field(default_factory=list)
    handoffs: dict[bytes, Any] = field(default_factory=dict)
    consumed: list[bytes] = field(default_factory=list)


def drawn(prompt: Sequence[int], generated: Sequence[int]) -> int:
    """A token that depends on all before it, so that a wrong prompt or a lost token shows. Never EOS."""
    digest = blake2b(repr((list(prompt), list(generated))).encode(), digest_size=4).digest()
    return 10 + int.from_bytes(digest, "big") % (VOCAB - 10)


class IterationResult:
    """Ends after `timeout` seconds of silence."""

    def __init__(self, items: deque[Any], timeout: float) -> None:
        self._items = items
        self._timeout = timeout

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._read()

    async def _read(self) -> AsyncIterator[Any]:
        silent = time.monotonic()
        while time.monotonic() - silent < self._timeout:
            if self._items:
                yield self._items.popleft()
                silent = time.monotonic()
            else:
                await asyncio.sleep(0.005)


class GenerationResult:
    """The consumer's side: the same list object grows with each chunk that is read."""

    def __init__(self, executor: Any, request_id: int, prompt: list[int]) -> None:
        asyncio.get_running_loop()  # without one there is no asynchronous queue
        self._executor = executor
        self._done = False
        self._aborted = False
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._request_id = request_id
        self._prompt = prompt
        self._outputs = [CompletionOutput(0)]
        self.disaggregated_params: Any = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.avg_decoded_tokens_per_iter = None
        self.metrics_dict: dict[str, Any] = {}
        self.trace_headers = None

    @property
    def request_id(self) -> int:
        return self._request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt

    @property
    def finished(self) -> bool:
        return self._done

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def context_logits(self) -> Any:
        return None

    @property
    def mm_embedding_handle(self) -> Any:
        return None

    def abort(self) -> None:
        """Says so and waits for nothing."""
        self._aborted = True
        self._executor.abort_request(self._request_id)

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None = None) -> Any:
        raise NotImplementedError

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self

    def clear_logprob_params(self) -> None:
        return None

    async def _step(self) -> None:
        said = await self._queue.get()
        if isinstance(said, Exception):
            self._done = True
            if not isinstance(said, RequestError):
                self._executor.shutdown()
            raise said
        new, finish, params, cached = said
        output = self._outputs[0]
        assert output.token_ids is not None
        output.token_ids += new  # the very list that was given out before
        if finish == "stop" and self._executor.world.strip_stop:
            output.token_ids = output.token_ids[:-1]
        output.finish_reason, output.disaggregated_params = finish, params
        self.cached_tokens = cached
        self._done = finish is not None

    def say(self, said: Any) -> None:
        self._queue.put_nowait(said)


class LLM:
    """Its executor is `simulator.Executor`; `world` is set on a subclass, so that the signature stays theirs."""

    world: World

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        from services.engine.trtllm_engine.contract import argument_names
        from tests.engine.trtllm_engine.simulator import Executor

        for name in kwargs:
            if name not in argument_names():
                raise ValueError(f"LLM got invalid argument: {name}")
        _must_be(kwargs.get("speculative_config"), configurations.DecodingBaseConfig)
        _must_be(kwargs.get("lora_config"), configurations.LoraConfig)
        self._skip_tokenizer = skip_tokenizer_init
        self._executor = Executor(self.world, kwargs)
        self.world.engines.append(self._executor)

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> Any:
        if self._executor.ended:
            raise RuntimeError("LLM is shutting down")
        if self.world.refuse is not None:
            raise self.world.refuse
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError("sampling_params")
        if sampling_params.end_id is None and self._skip_tokenizer:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        kind = None if disaggregated_params is None else disaggregated_params.request_type
        if kind == "context_only":
            sampling_params.max_tokens = 1  # in the caller's object
        _must_be(lora_request, configurations.LoRARequest)
        return self._executor.submit(
            list(inputs), sampling_params, streaming, disaggregated_params, cache_salt or "", lora_request
        )

    def get_stats(self, timeout: float | None = 2) -> list[Any]:
        raise NotImplementedError

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[Any]:
        raise NotImplementedError

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._executor.stats, timeout or 0.0)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._executor.events, timeout or 0.0)

    def shutdown(self) -> None:
        """Idempotent."""
        if not self._executor.ended:
            self._executor.shutdown()
        time.sleep(self.world.shutdown_s)


def _must_be(value: Any, kind: type) -> None:
    """Tables are made into objects by the command line of the package only."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{value!r} is no {kind.__name__}")


def api(world: World) -> Api:
    """The double in the place of the package."""
    return Api(
        version=VERSION,
        llm=type("LLM", (LLM,), {"world": world}),
        sampling_params=SamplingParams,
        guided_decoding=GuidedDecodingParams,
        disaggregated_params=DisaggregatedParams,
        kv_cache_config=KvCacheConfig,
        transceiver_config=CacheTransceiverConfig,
        speculative={kind: getattr(configurations, name).from_dict for kind, name in SPECULATIVE.items()},
        lora_config=configurations.LoraConfig,
        lora_request=configurations.LoRARequest,
        request_error=RequestError,
    )
