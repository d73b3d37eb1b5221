"""The double has the signatures of the contract, and 1.2.1's awkward ways."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import Any

import pytest

from services.engine.trtllm_engine import contract
from services.engine.trtllm_engine.contract import NO_DEFAULT, Parameter
from tests.engine.trtllm_engine import configurations, double
from tests.engine.trtllm_engine.double import (
    CacheTransceiverConfig,
    DisaggregatedParams,
    KvCacheConfig,
    RequestError,
    SamplingParams,
    World,
)
from tests.waiting import until


@pytest.mark.parametrize(
    ("fact", "function"),
    [
        (contract.LLM_FACT, double.LLM.__init__),
        (contract.GENERATE, double.LLM.generate_async),
        ("llmapi.LLM.get_stats_async", double.LLM.get_stats_async),
        ("llmapi.LLM.get_kv_cache_events_async", double.LLM.get_kv_cache_events_async),
        ("llmapi.LLM.shutdown", double.LLM.shutdown),
    ],
)
def test_signatures_are_those_of_the_contract(fact: str, function: Any) -> None:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    found = [
        Parameter(p.name, NO_DEFAULT if p.default is p.empty else p.default) for p in parameters if p.kind is not p.VAR_KEYWORD
    ]
    assert found == list(contract.parameters(fact))
    assert any(p.kind is p.VAR_KEYWORD for p in parameters) == contract.fact(fact).get("var_kw", False)
    assert inspect.iscoroutinefunction(function) == contract.fact(fact).get("async_def", False)


@pytest.mark.parametrize(
    ("fact", "made"),
    [
        (contract.DISAGGREGATED, double.DisaggregatedParams),
        (contract.COMPLETION, double.CompletionOutput),
        (contract.SAMPLING, double.SamplingParams),
        ("llmapi.GuidedDecodingParams", double.GuidedDecodingParams),
        (contract.KV_CACHE, double.KvCacheConfig),
        (contract.TRANSCEIVER, double.CacheTransceiverConfig),
        (contract.SPECULATIVE_BASE, configurations.DecodingBaseConfig),
        (contract.LORA_CONFIG, configurations.LoraConfig),
        (contract.LORA_REQUEST, configurations.LoRARequest),
    ],
)
def test_fields_are_those_of_the_contract(fact: str, made: type) -> None:
    assert [_field(one) for one in dataclasses.fields(made)] == list(contract.parameters(fact))
    wanted = contract.fact(fact).get("dataclass", {})
    assert hasattr(made, "__slots__") or not wanted.get("slots")
    for absent in contract.fact(fact).get("absent_in_1.2.1", ()):
        with pytest.raises(TypeError):
            made(**{absent: 1})


@pytest.mark.parametrize("name", contract.SPECULATIVE.values())
def test_speculative_configurations_are_those_of_the_contract(name: str) -> None:
    made = getattr(configurations, name)
    base = len(contract.parameters(contract.SPECULATIVE_BASE))
    assert [_field(one) for one in dataclasses.fields(made)][base:] == list(contract.parameters(f"llmapi.{name}"))
    assert contract.SPECULATIVE[contract.fact(f"llmapi.{name}")["decoding_type"]] == name


def test_a_result_has_what_the_contract_names() -> None:
    recorded = contract.fact(contract.RESULT)
    for name in (*recorded["properties"], *recorded["methods"]):
        assert hasattr(double.GenerationResult, name), name


def _field(one: dataclasses.Field[Any]) -> Parameter:
    if one.default_factory is not dataclasses.MISSING:
        return Parameter(one.name, str(one.default_factory()))
    return Parameter(one.name, NO_DEFAULT if one.default is dataclasses.MISSING else one.default)


# its ways


def engine(world: World, *, timeout_ms: int | None = 1000, prefill: bool = True, events: int = 100) -> Any:
    return double.api(world).llm(
        "m",
        kv_cache_config=KvCacheConfig(tokens_per_block=4, event_buffer_max_size=events),
        cache_transceiver_config=CacheTransceiverConfig(backend="DEFAULT", kv_transfer_timeout_ms=timeout_ms),
        disable_overlap_scheduler=prefill,
        enable_iter_perf_stats=True,
    )


def params(most: int = 4, **given: Any) -> SamplingParams:
    return SamplingParams(end_id=double.EOS, max_tokens=most, detokenize=False, **given)


async def context(llm: Any, prompt: list[int]) -> DisaggregatedParams:
    result = await llm.generate_async(prompt, params(), disaggregated_params=DisaggregatedParams(request_type="context_only"))
    assert result.outputs[0].finish_reason == "not_finished"
    return dataclasses.replace(result.outputs[0].disaggregated_params, request_type="generation_only")


async def test_a_pair_says_what_one_says_alone() -> None:
    world = World()
    one, other = engine(world), engine(world, prefill=False)
    alone = await one.generate_async([5, 6, 7], params())
    handoff = await context(one, [5, 6, 7])
    result = await other.generate_async([5, 6, 7], params(), disaggregated_params=handoff)
    assert result.outputs[0].token_ids == alone.outputs[0].token_ids
    assert result.cached_tokens == 3, "what was transferred counts as cached"


async def test_the_same_list_grows_and_the_callers_limit_is_written() -> None:
    llm = engine(World())
    lists, given = [], params(3)
    async for output in llm.generate_async([5], given, streaming=True):
        lists.append(output.outputs[0].token_ids)
    assert len(lists) == 3
    assert all(one is lists[0] for one in lists)
    await llm.generate_async([5], given, disaggregated_params=DisaggregatedParams(request_type="context_only"))
    assert given.max_tokens == 1


async def test_penalties_and_a_seed_change_nothing() -> None:
    llm = engine(World())
    plain = await llm.generate_async([5], params())
    other = await llm.generate_async([5], params(seed=3, repetition_penalty=2.0, presence_penalty=1.0))
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids


async def test_an_abort_after_the_context_response_does_nothing_and_the_clean_up_needs_a_new_prompt() -> None:
    world = World()
    llm = engine(world, timeout_ms=100)
    result = await llm.generate_async([5] * 9, params(), disaggregated_params=DisaggregatedParams(request_type="context_only"))
    result.abort()
    executor = world.engines[0]
    await asyncio.sleep(0.3)  # it must not happen
    assert executor.used == 3
    await llm.generate_async([6], params(1))
    assert executor.used == 0


async def test_a_full_pool_never_cleans_up() -> None:
    world = World(blocks=3)
    llm = engine(world, timeout_ms=50)
    await llm.generate_async([5] * 9, params(), disaggregated_params=DisaggregatedParams(request_type="context_only"))
    waiting = llm.generate_async([6], params(1))
    await asyncio.sleep(0.3)  # it must not happen
    assert not waiting.finished
    assert world.engines[0].used == 3


async def test_an_abort_during_a_transfer_waits_for_it() -> None:
    world = World(transfer_s=0.5)
    one, other = engine(world), engine(world, prefill=False)
    handoff = await context(one, [5, 6, 7])
    result = other.generate_async([5, 6, 7], params(50), streaming=True, disaggregated_params=handoff)
    await until(lambda: world.engines[1].active)
    result.abort()
    await asyncio.sleep(0.05)
    assert not result.finished
    async for _ in result:
        continue
    assert result.outputs[0].finish_reason == "cancelled"
    assert world.engines[0].used == 0, "the blocks were fetched"


async def test_a_handoff_is_there_once_and_a_second_one_waits_for_its_timeout() -> None:
    world = World()
    one, other = engine(world), engine(world, prefill=False, timeout_ms=100)
    handoff = await context(one, [5, 6, 7])
    await other.generate_async([5, 6, 7], params(), disaggregated_params=handoff)
    with pytest.raises(RequestError, match="timed out"):
        await other.generate_async([5, 6, 7], params(), disaggregated_params=handoff)


async def test_statistics_and_events_are_empty_before_the_first_request_and_end_by_themselves() -> None:
    llm = engine(World())
    assert [item async for item in llm.get_stats_async(timeout=0.02)] == []
    assert [item async for item in llm.get_kv_cache_events_async(timeout=0.02)] == []
    await llm.generate_async([5] * 9, params())
    stats = [item async for item in llm.get_stats_async(timeout=0.02)]
    assert set(stats[0]["kvCacheStats"]) == set(contract.fact("iteration stats json")["kvCacheStats"])
    assert set(stats[0]["inflightBatchingStats"]) == set(contract.fact("iteration stats json")["inflightBatchingStats"])
    assert set(stats[0]) <= set(contract.fact("iteration stats json")["top"])
    events = [item async for item in llm.get_kv_cache_events_async(timeout=0.02)]
    assert [event["event_id"] for event in events] == list(range(len(events)))
    assert [event["data"]["type"] for event in events] == ["created", "stored", "stored", "stored"]


async def test_the_event_buffer_drops_and_leaves_a_gap() -> None:
    llm = engine(World(), events=2)
    await llm.generate_async([5] * 20, params())
    events = [item async for item in llm.get_kv_cache_events_async(timeout=0.02)]
    assert len(events) == 2
    assert events[0]["event_id"] > 0


async def test_a_fault_shuts_the_engine_down() -> None:
    world = World()
    llm = engine(world)
    result = llm.generate_async([5], params(10**6), streaming=True)
    world.engines[0].fault = double.EngineFault("a rank died")
    with pytest.raises(double.EngineFault):
        await result
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async([5], params())


async def test_what_the_api_refuses_it_refuses_at_once() -> None:
    llm = engine(World(), prefill=False)
    with pytest.raises(ValueError, match="overlap"):
        llm.generate_async([5], params(), disaggregated_params=DisaggregatedParams(request_type="context_only"))
    with pytest.raises(ValueError, match="request type"):
        DisaggregatedParams(request_type="nonsense")
    with pytest.raises(ValueError, match="invalid argument"):
        double.api(World()).llm("m", priority=1)
