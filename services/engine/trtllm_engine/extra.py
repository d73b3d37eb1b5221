"""`trtllm.extra`: arguments of TensorRT-LLM's `LLM` that no setting stands for, checked by name.

Pure. Invariants: what goes through was recorded of 1.2.1, and replaces nothing that the adapter counts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.engine.trtllm_engine.contract import KV_CACHE, TRANSCEIVER, VERSION, argument_names, names
from services.settings.errors import SettingsError

_OURS = frozenset(
    "model tokenizer skip_tokenizer_init tensor_parallel_size pipeline_parallel_size dtype max_batch_size max_num_tokens "
    "max_seq_len max_beam_width enable_chunked_prefill disable_overlap_scheduler enable_iter_perf_stats return_perf_metrics "
    "guided_decoding_backend speculative_config enable_lora lora_config trust_remote_code stream_interval".split()
)
"""`trust_remote_code` would run what a model's folder holds; the others have a key of their own or must be as they are."""
_NOT_HERE = {
    "enable_attention_dp": "1.2 may lose cancels with it, and its statistics are one rank's",
    "context_parallel_size": "handoffs of such engines are known to nobody here",
    "orchestrator_type": "only MPI's ranks are led here",
    "num_postprocess_workers": "answers would be made into text elsewhere",
}
_TABLES = {
    "kv_cache_config": (
        KV_CACHE,
        frozenset({"free_gpu_memory_fraction", "enable_block_reuse", "event_buffer_max_size", "dtype", "tokens_per_block"}),
    ),
    "cache_transceiver_config": (TRANSCEIVER, frozenset({"backend", "kv_transfer_timeout_ms"})),
}
"""What is recorded of each, and which of its fields have a setting of their own."""
_SHAPE = ("sparse_attention_config", "max_attention_window", "sink_token_length", "mamba_ssm_cache_dtype")
"""What changes the content of KV blocks."""
_POLICY = "GUARANTEED_NO_EVICT"


def checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that is safe to pass on. Raises `SettingsError` that names the key."""
    known = argument_names() - _OURS
    for name, value in extra.items():
        if name in _OURS:
            raise _wrong(name, "has a setting of its own, or must be as it is")
        if name in _NOT_HERE:
            raise _wrong(name, _NOT_HERE[name])
        if name not in known:
            raise _wrong(name, f"TensorRT-LLM {VERSION} takes no such argument, as far as is recorded")
        if name in _TABLES:
            _check_table(name, value)
        if name == "scheduler_config":
            _must_not_evict(value)
    return dict(extra)


def shape(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Of it, what engines must have in common whose KV blocks are exchanged."""
    all_of_it = {**extra, **extra.get("kv_cache_config", {})}
    return {name: all_of_it[name] for name in _SHAPE if name in all_of_it}


def _check_table(name: str, value: Any) -> None:
    fact, ours = _TABLES[name]
    if not isinstance(value, dict):
        raise _wrong(name, "is no table")
    for key in value:
        if key in ours:
            raise _wrong(f"{name}.{key}", "has a setting of its own")
        if key not in names(fact):
            raise _wrong(f"{name}.{key}", f"TensorRT-LLM {VERSION} has no such field")


def _must_not_evict(value: Any) -> None:
    """Room is counted as for requests that always run to their end."""
    if not isinstance(value, dict):
        raise _wrong("scheduler_config", "is no table")
    if value.get("capacity_scheduler_policy", _POLICY) != _POLICY:
        raise _wrong("scheduler_config.capacity_scheduler_policy", f"must be {_POLICY}")


def _wrong(key: str, text: str) -> SettingsError:
    return SettingsError(f"trtllm.extra.{key}: {text}")
