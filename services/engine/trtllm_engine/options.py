"""Our settings as the arguments of TensorRT-LLM's `LLM`.

Pure, but for a look at the adapters' folders. Invariants: `kv_transfer_timeout_ms` is set always; what computes prompts runs
without the overlap scheduler, as 1.2.1 wants it; `extra` neither invents an argument nor replaces one that a setting stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from schemas.state import Role
from services.engine.trtllm_engine.adapters import Adapter, read_adapters
from services.engine.trtllm_engine.extra import checked_extra
from services.engine.trtllm_engine.speculation import Speculation, speculation
from services.settings.errors import SettingsError
from services.settings.trtllm import TrtllmSettings


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of `LLM(model, …)`, and of what is an object of a class of the package."""

    llm: dict[str, Any]
    kv_cache: dict[str, Any]
    transceiver: dict[str, Any]
    speculation: Speculation | None
    adapters: tuple[Adapter, ...]


def options(settings: TrtllmSettings, role: Role, context_length: int) -> Options:
    """`context_length`: tokens of prompt and answer together. Raises `SettingsError` that names the key."""
    if settings.pipeline_parallel > 1 and role is not Role.BOTH:
        raise SettingsError("trtllm.pipeline_parallel: 1.2's release notes know a hang with it when phases are apart; use 1")
    if not settings.chunked_prefill and settings.step_tokens < context_length:
        text = f"without chunked prefill a prompt must fit one step, and the context is {context_length} tokens"
        raise SettingsError(f"trtllm.step_tokens: {text}")
    extra = checked_extra(settings.extra)
    llm: dict[str, Any] = {
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "dtype": settings.dtype,
        "skip_tokenizer_init": not settings.guided_decoding,  # a grammar needs the tokenizer, nothing else does
        "max_batch_size": settings.max_batch,
        "max_num_tokens": settings.step_tokens,
        "max_seq_len": context_length,
        "max_beam_width": 1,
        "enable_chunked_prefill": settings.chunked_prefill,
        "disable_overlap_scheduler": role is not Role.DECODE,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": False,
    }
    if settings.guided_decoding:
        llm["guided_decoding_backend"] = settings.guided_decoding
    kv_cache = {
        "free_gpu_memory_fraction": settings.kv_fraction,
        "enable_block_reuse": settings.block_reuse,
        "event_buffer_max_size": settings.event_buffer if settings.block_reuse else 0,
        "dtype": settings.kv_dtype,
        "tokens_per_block": settings.block_tokens,
        **extra.pop("kv_cache_config", {}),
    }
    transceiver = {
        "backend": settings.transceiver,
        "max_tokens_in_buffer": context_length,
        "kv_transfer_timeout_ms": max(1, round(1000 * settings.transfer_timeout_s)),
        **extra.pop("cache_transceiver_config", {}),
    }
    speculative = speculation(settings.speculative) if settings.speculative else None
    return Options(llm | extra, kv_cache, transceiver, speculative, read_adapters(settings))
