"""The adapter's two phases on the double: what is asked of TensorRT-LLM, and what comes back of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import ContextLengthExceeded, InvalidRequest, Unavailable, UnreadableMessage, UnsupportedParameter
from schemas.job import Choice, Grammar
from schemas.lifecycle import State
from schemas.reply import FinishReason
from schemas.state import Role
from services.engine.protocol import EngineWorn, RunEnd
from services.engine.trtllm_engine.capabilities import capabilities
from services.engine.trtllm_engine.handoff import OpaqueState, encode
from services.engine.trtllm_engine.legs import Kind, Leg
from services.kv.pool import PoolExhausted
from services.settings.trtllm import TrtllmSettings
from tests.engine.trtllm_engine.double import EOS, CompletionOutput, EngineFault, World
from tests.engine.trtllm_engine.rig import Heard, answer, engines, spec
from tests.waiting import until

PROMPT = list(range(20, 30))


async def hand_off(prefill: Heard, run: int, most: int = 6) -> bytes:
    prefill.engine.prefill(spec(run, most=most))
    await until(lambda: run in prefill.prefilled)
    return prefill.prefilled[run].opaque


def consume(prefill: Heard, decode: Heard, run: int, opaque: bytes, most: int = 6) -> None:
    decode.engine.decode(spec(run, most=most), prefill.first(run), cached_tokens=3, compute_s=0.5, opaque=opaque)


async def test_prefills_token_comes_early_and_is_dropped_from_decodes_stream() -> None:
    async with engines(World(), Role.PREFILL, Role.DECODE) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        assert [(o.index, o.finish) for o in prefill.outputs] == [(0, None)]
        consume(prefill, decode, 1, opaque)
        await until(lambda: 1 in decode.ended)
        assert prefill.tokens(1) + decode.tokens(1) == answer(PROMPT, 6)
        assert [o.index for o in decode.outputs] == [1, 2, 3, 4, 5]
        assert (decode.outputs[-1].finish, decode.state(1)) == (FinishReason.LENGTH, State.FINISHED)
        assert all(o.cached_tokens == 3 and o.compute_s >= 0.5 for o in decode.outputs), "prefill's, not what was transferred"


async def test_one_token_is_computed_whole_without_a_handoff() -> None:
    world = World()
    async with engines(world, Role.PREFILL) as (prefill,):
        prefill.engine.prefill(spec(1, most=1))
        prefill.engine.prefill(spec(2, most=3, generated=(50, 51)))
        await until(lambda: len(prefill.ended) == 2)
        assert prefill.tokens(1) == answer(PROMPT, 1)
        assert prefill.outputs[0].finish is FinishReason.LENGTH
        assert [o.index for o in prefill.outputs if o.run == 2] == [2]
        assert {request.kind for request in world.engines[0].asked} == {"context_and_generation"}


async def test_an_answer_that_ends_with_its_first_token_is_final() -> None:
    async with engines(World(answer=lambda prompt, generated: EOS), Role.PREFILL) as (prefill,):
        prefill.engine.prefill(spec(1))
        await until(lambda: 1 in prefill.ended)
        assert [(o.token, o.finish) for o in prefill.outputs] == [(EOS, FinishReason.STOP)]
        assert not prefill.prefilled


@pytest.mark.parametrize("strip", [False, True])
async def test_a_stop_token_is_reported_whether_the_engine_strips_it_or_not(strip: bool) -> None:
    world = World(answer=lambda prompt, generated: 99 if len(generated) == 2 else 50 + len(generated), strip_stop=strip)
    async with engines(world, Role.BOTH) as (both,):
        both.engine.prefill(spec(1, stop_token_ids=(99,)), then_decode=True)
        await until(lambda: 1 in both.ended)
        assert both.tokens(1)[:2] == [50, 51]
        assert len(both.tokens(1)) == 3
        assert both.outputs[-1].finish is FinishReason.STOP


def test_a_finish_is_carried_by_a_token_that_was_not_reported_before() -> None:
    """A first chunk that holds prefill's token and the end, whose stop token the engine stripped."""
    result: Any = None
    leg = Leg(spec(1), Kind.GENERATION, result, 0.0, repeats=(50,))
    completion = CompletionOutput(0, token_ids=[50], finish_reason="stop", stop_reason=7)
    outputs = leg.outputs(leg.take(completion, EOS), FinishReason.STOP)
    assert [(output.index, output.token, output.finish) for output in outputs] == [(1, 7, FinishReason.STOP)]
    assert leg.agrees()


async def test_both_phases_in_one_engine() -> None:
    async with engines(World(), Role.BOTH) as (both,):
        both.engine.prefill(spec(1), then_decode=True)
        await until(lambda: 1 in both.ended)
        assert both.tokens(1) == answer(PROMPT, 6)


async def test_a_resumed_run_goes_on_from_what_it_has() -> None:
    async with engines(World(), Role.PREFILL, Role.DECODE) as (prefill, decode):
        begun = spec(1, most=6, generated=(50, 51))
        prefill.engine.prefill(begun)
        await until(lambda: 1 in prefill.prefilled)
        opaque = prefill.prefilled[1].opaque
        decode.engine.decode(begun, prefill.first(1), cached_tokens=0, compute_s=0.0, opaque=opaque)
        await until(lambda: 1 in decode.ended)
        assert prefill.tokens(1) + decode.tokens(1) == answer(PROMPT, 4, (50, 51))
        assert decode.outputs[-1].index == 5


@pytest.mark.parametrize("then_decode", [False, True])
async def test_a_run_that_has_begun_what_a_grammar_describes_cannot_go_on(then_decode: bool) -> None:
    """A request begins its grammar anew: a second object behind half of one would pass for an answer."""
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        both.engine.info = replace(both.engine.info, capabilities=capabilities(TrtllmSettings(guided_decoding="xgrammar")))
        asked, grammar = len(world.engines[0].asked), Grammar(kind="json_object", source="")
        both.engine.prefill(spec(1, generated=(50, 51), grammar=grammar), then_decode=then_decode)
        await until(lambda: 1 in both.ended)
        assert both.ended[1] == RunEnd(1, State.FAILED, "grammar_begun"), "no code: the request is not to blame"
        assert (both.engine.pool.held, len(world.engines[0].asked)) == (0, asked)
        both.engine.prefill(spec(2, grammar=grammar), then_decode=True)
        await until(lambda: 2 in both.ended)
        assert both.state(2) is State.FINISHED


async def test_sampling_is_a_fresh_object_and_what_would_be_ignored_is_not_passed() -> None:
    world = World()
    async with engines(world, Role.PREFILL) as (prefill,):
        wanted = {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_tokens": 2,
            "stop_token_ids": (7,),
            "repetition_penalty": 1.5,
        }
        prefill.engine.prefill(spec(1, **wanted))
        prefill.engine.prefill(spec(2, temperature=0.0))
        await until(lambda: len(prefill.prefilled) == 2)
        one, two = (request.params for request in world.engines[0].asked[-2:])
        assert one is not two
        assert (one.end_id, one.detokenize, one.temperature, one.top_p, one.top_k) == (EOS, False, 0.7, 0.9, 5)
        assert (one.min_tokens, one.stop_token_ids) == (2, [7])
        assert (one.seed, one.repetition_penalty, one.n) == (None, None, 1)
        assert (two.temperature, two.top_p, two.top_k) == (None, None, None), "nothing set is greedy"


async def test_tenants_share_no_blocks() -> None:
    from dataclasses import replace

    world = World()
    async with engines(world, Role.BOTH) as (both,):
        for run, salt in ((1, b"one"), (2, b"one"), (3, b"two")):
            both.engine.prefill(replace(spec(run), salt=salt), then_decode=True)
            await until(lambda run=run: run in both.ended)
        assert [next(o for o in both.outputs if o.run == run).cached_tokens for run in (1, 2, 3)] == [0, 8, 0]


async def test_what_the_engine_cannot_do_is_refused_before_it_is_asked() -> None:
    from dataclasses import replace

    world = World(blocks=8)
    async with engines(world, Role.PREFILL) as (prefill,):
        asked = len(world.engines[0].asked)
        with pytest.raises(UnsupportedParameter):
            prefill.engine.prefill(replace(spec(1), choices=(Choice(index=0), Choice(index=1))))
        with pytest.raises(UnsupportedParameter):
            prefill.engine.prefill(spec(1, grammar=Grammar(kind="regex", source="a")))
        with pytest.raises(UnsupportedParameter):
            prefill.engine.prefill(replace(spec(1), adapter="poet"))
        with pytest.raises(InvalidRequest):
            prefill.engine.prefill(spec(1, [10**6]))
        with pytest.raises(ContextLengthExceeded):
            prefill.engine.prefill(spec(1, [20] * 40))
        prefill.engine.prefill(spec(1, [20] * 26))
        with pytest.raises(PoolExhausted):
            prefill.engine.prefill(spec(2, [20] * 26))
        with pytest.raises(PoolExhausted):
            prefill.engine.prefill(spec(3, [20], most=8), then_decode=True)
        await until(lambda: 1 in prefill.prefilled)
        assert len(world.engines[0].asked) == asked + 1


async def test_what_the_engine_refuses_is_the_requests_fault_and_leaves_nothing() -> None:
    world = World()
    async with engines(world, Role.PREFILL) as (prefill,):
        world.refuse = ValueError("prompt too long")
        with pytest.raises(InvalidRequest):
            prefill.engine.prefill(spec(1))
        world.refuse = None
        assert prefill.engine.pool.held == 0
        await hand_off(prefill, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.2.0"},
        {"prompt_tokens": 9},
        {"ctx_request_id": -1},
        {"first_gen_tokens": ()},
        {"first_gen_tokens": (11, 12)},
        {"opaque_state": b""},
        {"draft_tokens": (10**6,)},
        {"draft_tokens": (1,) * 65},
        {"opaque_state": b"x" * 2**20},
    ],
)
async def test_a_handoff_is_checked_before_the_engine_sees_it(change: dict[str, object]) -> None:
    import msgspec

    world = World()
    async with engines(world, Role.PREFILL, Role.DECODE) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        bad = encode(msgspec.structs.replace(msgspec.msgpack.decode(opaque, type=OpaqueState), **change))
        with pytest.raises(UnreadableMessage):
            consume(prefill, decode, 1, bad)
        for junk in (b"x", b"\x80", opaque[:-1], b"cos\nsystem\n(S'true'\ntR."):
            with pytest.raises(UnreadableMessage):
                consume(prefill, decode, 1, junk)
        assert world.consumed == []
        consume(prefill, decode, 1, opaque)
        await until(lambda: 1 in decode.ended)


async def test_no_handoff_is_consumed_twice() -> None:
    world = World()
    async with engines(world, Role.PREFILL, Role.DECODE) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        consume(prefill, decode, 1, opaque)
        await until(lambda: 1 in decode.ended)
        with pytest.raises(UnreadableMessage, match="consumed"):
            consume(prefill, decode, 1, opaque)
        assert len(world.consumed) == 1


# cancels


async def test_before_commit_a_cancel_takes_one_iteration() -> None:
    world = World()
    async with engines(world, Role.PREFILL) as (prefill,):
        world.prefill_s = 30.0  # not of the request that warms it up
        prefill.engine.prefill(spec(1))
        await until(lambda: world.engines[0].active)
        prefill.engine.cancel(1)
        await until(lambda: 1 in prefill.ended)
        assert (prefill.state(1), prefill.engine.pool.held) == (State.CANCELLED, 0)


async def test_a_cancel_that_comes_as_the_prompt_is_done_still_hands_off() -> None:
    world = World()
    async with engines(world, Role.PREFILL) as (prefill,):
        world.engines[0].late_abort = 5
        prefill.engine.prefill(spec(1))
        prefill.engine.cancel(1)
        await until(lambda: 1 in prefill.prefilled)
        assert prefill.prefilled[1].opaque
        assert prefill.first(1)
        assert 1 not in prefill.ended


async def test_decodes_abort_waits_for_its_first_chunk() -> None:
    world = World(transfer_s=0.3)
    async with engines(world, Role.PREFILL, Role.DECODE) as (prefill, decode):
        opaque = await hand_off(prefill, 1, most=100)
        consume(prefill, decode, 1, opaque, most=100)
        decode.engine.cancel(1)
        assert world.engines[1].asked[-1].aborts is None
        await until(lambda: 1 in decode.ended)
        assert (decode.state(1), decode.outputs) == (State.CANCELLED, [])
        assert len(world.engines[1].asked[-1].generated) <= 3, "one chunk, and an iteration more"
        assert world.engines[0].used == 0, "the handoff was consumed"


async def test_an_abort_that_comes_late_is_waited_for() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        world.engines[0].late_abort = 20
        both.engine.prefill(spec(1, most=100), then_decode=True)
        await until(lambda: both.outputs)
        both.engine.cancel(1)
        told = len(both.outputs)
        await until(lambda: 1 in both.ended)
        assert both.state(1) is State.CANCELLED
        assert len(both.outputs) == told, "nobody waits for more tokens"


async def test_dropping_its_only_choice_finishes_a_run() -> None:
    async with engines(World(), Role.BOTH) as (both,):
        both.engine.prefill(spec(1, most=100), then_decode=True)
        await until(lambda: both.outputs)
        both.engine.cancel(1, [3])
        both.engine.cancel(1, [0])
        await until(lambda: 1 in both.ended)
        assert both.state(1) is State.FINISHED


async def test_a_paused_engine_tells_nothing_but_the_ends_of_what_is_dropped() -> None:
    async with engines(World(), Role.BOTH) as (both,):
        both.engine.pause()
        both.engine.prefill(spec(1), then_decode=True)
        both.engine.prefill(spec(2, most=100), then_decode=True)
        await until(lambda: len(both.engine._requests) == 1)
        assert both.outputs == []
        both.engine.cancel(2)
        await until(lambda: 2 in both.ended)
        assert both.outputs == []
        both.engine.resume()
        await until(lambda: 1 in both.ended)
        assert both.tokens(1) == answer(PROMPT, 6)


# failures


async def test_a_failed_transfer_ends_as_retry_and_the_engine_goes_on() -> None:
    world = World()
    async with engines(world, Role.PREFILL, Role.DECODE, timeout_s=0.3) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        world.handoffs.clear()  # the sender is gone
        consume(prefill, decode, 1, opaque)
        await until(lambda: 1 in decode.ended)
        assert (decode.state(1), decode.ended[1].reason) == (State.RETRY, "engine_request_error")
        opaque = await hand_off(prefill, 2)
        consume(prefill, decode, 2, opaque)
        await until(lambda: decode.state(2) is State.FINISHED)


async def test_a_transfer_that_never_ends_is_given_up_and_the_engine_replaced() -> None:
    world = World()
    async with engines(world, Role.PREFILL, Role.DECODE, timeout_s=0.2) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        world.engines[1].stuck = True
        consume(prefill, decode, 1, opaque)
        await until(lambda: 1 in decode.ended)
        assert (decode.state(1), decode.ended[1].reason) == (State.RETRY, "handoff_lost")
        with pytest.raises(EngineWorn):
            await decode.engine.join()


async def test_another_first_token_than_prefills_fails_the_run() -> None:
    world = World()
    async with engines(world, Role.PREFILL, Role.DECODE) as (prefill, decode):
        opaque = await hand_off(prefill, 1)
        consume(prefill, decode, 1, opaque)
        world.engines[1].asked[-1].given.first_gen_tokens = [77]
        await until(lambda: 1 in decode.ended)
        assert (decode.state(1), decode.ended[1].reason) == (State.FAILED, "other_first_token")


async def test_a_fault_ends_the_engine_and_begins_nothing_more() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        both.engine.prefill(spec(1, most=100), then_decode=True)
        await until(lambda: both.outputs)
        world.engines[0].fault = EngineFault("a rank died")
        with pytest.raises(EngineFault):
            await both.engine.join()
        with pytest.raises(Unavailable):
            both.engine.prefill(spec(2))


async def test_a_call_that_finds_the_engine_shut_down_ends_it() -> None:
    world = World()
    async with engines(world, Role.BOTH) as (both,):
        world.engines[0].shutdown()
        with pytest.raises(Unavailable):
            both.engine.prefill(spec(1))
        with pytest.raises(RuntimeError, match="shutting down"):
            await both.engine.join()


async def test_an_engine_that_does_not_warm_up_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.engine.trtllm_engine import canary as module
    from tests.engine.trtllm_engine.rig import build

    monkeypatch.setattr(module, "WARM_UP_S", 0.1)
    world = World()
    cold = build(world, Role.PREFILL)
    world.engines[0].stuck = True
    with pytest.raises(Unavailable, match="first request"):
        await cold.warm_up()
