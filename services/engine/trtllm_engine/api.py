"""The part of `tensorrt_llm` that this adapter calls, as one value: the only place that imports the package.

Invariant: nothing is imported before the static verifier passed it. Tests pass a double in its place.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.engine.trtllm_engine.contract import SPECULATIVE, VERSION
from services.engine.trtllm_engine.findings import Verdict
from services.engine.trtllm_engine.verifier import find, verify
from services.settings.errors import SettingsError

_log = logging.getLogger(__name__)


class Result(Protocol):
    """A `RequestOutput`: the same object again in each step of its iteration. `outputs[0].token_ids` grows in place."""

    outputs: list[Any]
    cached_tokens: int

    def abort(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Result]: ...


class Iterations(Protocol):
    """An `IterationResult`: ends after its timeout of silence, not with the engine."""

    def __aiter__(self) -> AsyncIterator[Any]: ...


class Llm(Protocol):
    """An `LLM`. `generate_async` is no coroutine function; it must be called inside a running loop, and may raise at once."""

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: Any,
        *,
        streaming: bool,
        lora_request: Any = None,
        disaggregated_params: Any = None,
        cache_salt: str | None = None,
    ) -> Result: ...

    def get_stats_async(self, timeout: float) -> Iterations: ...

    def get_kv_cache_events_async(self, timeout: float) -> Iterations: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Api:
    """Classes of `tensorrt_llm`, by what they are to us. `speculative`: how one is made of its fields, by decoding type."""

    version: str
    llm: Callable[..., Llm]
    sampling_params: Callable[..., Any]
    guided_decoding: Callable[..., Any]
    disaggregated_params: Callable[..., Any]
    kv_cache_config: Callable[..., Any]
    transceiver_config: Callable[..., Any]
    speculative: Mapping[str, Callable[[dict[str, Any]], Any]]
    lora_config: Callable[..., Any]
    lora_request: Callable[..., Any]
    request_error: type[Exception]


def load() -> Api:
    """The installed package. Raises `SettingsError` when it is not there, or not the one that this adapter was written for."""
    report = verify(find())
    if report.verdict is Verdict.SKIPPED:
        raise SettingsError("worker.engine: trtllm needs TensorRT-LLM 1.2.1, which is not installed here")
    for note in report.notes:
        _log.info("tensorrt_llm: %s", note)
    if report.verdict is Verdict.FAILED:
        raise SettingsError(f"worker.engine: this tensorrt_llm is not the one its adapter knows: {'; '.join(report.wrong[:5])}")
    try:
        return _imported()
    except (ImportError, OSError, AttributeError) as error:  # libcuda.so.1 is not there, a library of MPI is another one, …
        raise SettingsError(f"worker.engine: tensorrt_llm cannot be imported here: {error}") from error


def _imported() -> Api:
    package = importlib.import_module("tensorrt_llm")
    llmapi = importlib.import_module("tensorrt_llm.llmapi")
    if package.__version__ != VERSION:
        raise SettingsError(f"worker.engine: tensorrt_llm calls itself {package.__version__}, not {VERSION}")
    return Api(
        version=package.__version__,
        llm=llmapi.LLM,
        sampling_params=llmapi.SamplingParams,
        guided_decoding=llmapi.GuidedDecodingParams,
        disaggregated_params=llmapi.DisaggregatedParams,
        kv_cache_config=llmapi.KvCacheConfig,
        transceiver_config=llmapi.CacheTransceiverConfig,
        speculative={kind: getattr(llmapi, name).from_dict for kind, name in SPECULATIVE.items()},
        lora_config=importlib.import_module("tensorrt_llm.lora_helper").LoraConfig,
        lora_request=importlib.import_module("tensorrt_llm.executor.request").LoRARequest,
        request_error=llmapi.RequestError,
    )
