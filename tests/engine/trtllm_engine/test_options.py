"""Settings become arguments of `LLM`: what must always be set is, and what nobody would heed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.state import Role
from services.engine.trtllm_engine import contract
from services.engine.trtllm_engine.capabilities import capabilities
from services.engine.trtllm_engine.options import options
from services.settings.errors import SettingsError
from services.settings.trtllm import TrtllmSettings


def made(role: Role = Role.PREFILL, **given: Any) -> Any:
    return options(TrtllmSettings(**given), role, 4096)


@pytest.mark.parametrize("role", list(Role))
def test_the_transfer_timeout_is_always_set(role: Role) -> None:
    assert made(role).transceiver["kv_transfer_timeout_ms"] == 60_000
    assert made(role, transfer_timeout_s=0.0001).transceiver["kv_transfer_timeout_ms"] == 1
    with pytest.raises(SettingsError, match="kv_transfer_timeout_ms"):
        made(role, extra={"cache_transceiver_config": {"kv_transfer_timeout_ms": None}})


def test_what_computes_prompts_runs_without_overlap() -> None:
    assert [made(role).llm["disable_overlap_scheduler"] for role in Role] == [True, False, True]


def test_every_argument_is_one_that_was_recorded() -> None:
    everything = made(guided_decoding="xgrammar", extra={"env_overrides": {}})
    assert set(everything.llm) <= contract.argument_names()
    assert set(everything.kv_cache) <= contract.names(contract.KV_CACHE)
    assert set(everything.transceiver) <= contract.names(contract.TRANSCEIVER)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"extra": {"max_batch": 3}}, "trtllm.extra.max_batch"),
        ({"extra": {"max_batch_size": 3}}, "has a setting of its own"),
        ({"extra": {"trust_remote_code": True}}, "trtllm.extra.trust_remote_code"),
        ({"extra": {"kv_cache_config": {"tokens_per_block": 64}}}, "kv_cache_config.tokens_per_block"),
        ({"extra": {"kv_cache_config": {"blocks": 64}}}, "kv_cache_config.blocks"),
        ({"extra": {"kv_cache_config": 3}}, "is no table"),
        ({"extra": {"cache_transceiver_config": {"transceiver_runtime": "PYTHON"}}}, "transceiver_runtime"),
        ({"extra": {"enable_attention_dp": True}}, "trtllm.extra.enable_attention_dp: 1.2 may lose cancels"),
        ({"extra": {"context_parallel_size": 2}}, "trtllm.extra.context_parallel_size"),
        ({"extra": {"orchestrator_type": "ray"}}, "trtllm.extra.orchestrator_type"),
        ({"extra": {"num_postprocess_workers": 1}}, "trtllm.extra.num_postprocess_workers"),
        (
            {"extra": {"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}},
            "scheduler_config.capacity_scheduler_policy: must be GUARANTEED_NO_EVICT",
        ),
        ({"adapters": {"a": Path("/nowhere/at/all")}}, "trtllm.adapters.a"),
        ({"pipeline_parallel": 2}, "pipeline_parallel"),
        ({"chunked_prefill": False, "step_tokens": 4095}, "trtllm.step_tokens: without chunked prefill"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        made(**given)


def test_the_rest_goes_through() -> None:
    assert not made(chunked_prefill=False, step_tokens=4096).llm["enable_chunked_prefill"]
    made(extra={"scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"}})
    through = made(extra={"batch_wait_timeout_ms": 5, "kv_cache_config": {"host_cache_size": 2**30}})
    assert through.llm["batch_wait_timeout_ms"] == 5
    assert through.kv_cache["host_cache_size"] == 2**30
    assert "kv_cache_config" not in through.llm


def test_capabilities_are_what_it_does() -> None:
    plain = capabilities(TrtllmSettings())
    assert not any((plain.seed, plain.penalties, plain.n, plain.logprobs, plain.exact_resume, plain.prompt_logprobs))
    assert plain.must_hand_off
    assert plain.grammar == ()
    assert "json_schema" in capabilities(TrtllmSettings(guided_decoding="xgrammar")).grammar
