"""The TensorRT-LLM engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from services.settings.section import LARGEST, Seconds, Section


class TrtllmSettings(Section):
    """The TensorRT-LLM engine (docs/tensorrt_llm.md), for which these stand in the place of what `worker` says of computing.

    `kv_fraction`: of the GPU memory that the weights leave. `block_tokens`: TensorRT-LLM's tokens_per_block. `step_tokens`: its
    max_num_tokens; `max_batch`: its max_batch_size. `max_context`: tokens of prompt and answer, unset = the model's.
    `quantization`: what the checkpoint must say, "" = whatever it says; `kv_dtype`: of the KV cache.
    `speculative`: its speculative_config, `decoding_type` and the fields that goes with; empty = none.
    `guided_decoding`: the backend of constrained output, "" = none is offered. `adapters`: LoRA adapters by name, each a folder.
    `transceiver`: the backend that moves KV; `transfer_timeout_s`: when it gives up a handoff that nobody fetched. It is a
    backstop, well above the longest transfer. `event_buffer`: KV cache events kept until they are read.
    `shutdown_timeout_s`: the longest an engine may take to end. `extra`: arguments of its LLM class that no key here stands for.
    """

    tensor_parallel: int = Field(1, ge=1, le=1024)
    pipeline_parallel: int = Field(1, ge=1, le=1024)
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    quantization: str = ""
    kv_fraction: float = Field(0.9, gt=0, lt=1)
    kv_dtype: Literal["auto", "fp8", "nvfp4"] = "auto"
    block_tokens: int = Field(32, ge=1, le=1024)
    block_reuse: bool = True
    chunked_prefill: bool = True
    max_batch: int = Field(256, gt=0, le=LARGEST)
    step_tokens: int = Field(8192, gt=0, le=LARGEST)
    max_context: int | None = Field(None, gt=1, le=LARGEST)
    speculative: dict[str, Any] = {}
    guided_decoding: Literal["", "xgrammar", "llguidance"] = ""
    adapters: dict[str, Path] = {}
    max_adapter_rank: int = Field(64, gt=0, le=1024)
    transceiver: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] = "DEFAULT"
    transfer_timeout_s: Seconds = 60.0
    event_buffer: int = Field(2**16, gt=0, le=LARGEST)
    shutdown_timeout_s: Seconds = 20.0
    extra: dict[str, Any] = {}
