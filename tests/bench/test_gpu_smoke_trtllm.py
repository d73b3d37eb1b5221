"""TensorRT-LLM's checks for a GPU, on its double: they pass on what is as recorded, and fail on what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_smoke import SKIPPED, main
from bench.gpu_smoke_trtllm import smoke
from bench.trtllm_shapes import of_events, of_statistics
from schemas.state import Role
from services.engine.trtllm_engine.capabilities import capabilities
from services.engine.trtllm_engine.engine import TrtllmEngine
from services.settings.trtllm import TrtllmSettings
from tests.engine.trtllm_engine import package
from tests.engine.trtllm_engine.double import World
from tests.engine.trtllm_engine.rig import build

STATISTICS: dict[str, Any] = {
    "iterLatencyMS": 1.0,
    "numQueuedRequests": 0,
    "kvCacheStats": {"usedNumBlocks": 0, "maxNumBlocks": 9, "tokensPerBlock": 32},
    "inflightBatchingStats": {"numPausedRequests": 0, "numCtxTokens": 0},
}


def digits(tokens: Sequence[int]) -> str:
    return "7" * len(tokens)


async def run(world: World, spell: Any = digits, *, grammars: bool = True) -> int:
    def opened(role: str) -> TrtllmEngine:
        engine = build(world, Role(role), 1.0)
        backend: Any = "xgrammar" if grammars else ""
        engine.info = replace(engine.info, capabilities=capabilities(TrtllmSettings(guided_decoding=backend)))
        return engine

    return await smoke(opened, spell, 1.0, length=24, count=8)


def small(**more: Any) -> World:
    return World(blocks=400, step_s=0.002, **more)


def failed(said: str) -> list[str]:
    return [line[:40].strip() for line in said.splitlines() if line[41:47] == "FAILED"]


@pytest.mark.slow
async def test_an_engine_as_recorded_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code = await run(small())
    said = capsys.readouterr().out
    assert (code, failed(said)) == (0, []), said
    for row in (
        "statistics",
        "kv events",
        "a seed repeats",
        "penalties",
        "handoff and first chunk",
        "greedy",
        "grammar on token 1",
        "cancel before",
        "cancel during",
        "cancel while decoding",
        "orphan",
        "time to first token",
        "tokens/s",
    ):
        assert row in said
    assert "NOT CHECKED" not in said


@pytest.mark.slow
async def test_an_orphan_that_is_never_freed_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(small(leak=True)) == 1
    assert failed(capsys.readouterr().out) == ["orphan freed at the timeout"]


@pytest.mark.slow
async def test_a_check_that_breaks_off_fails_and_the_next_ones_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever breaks it: here a tokenizer that knows none of the tokens. And what was not checked is not called so."""

    def unable(tokens: Sequence[int]) -> str:
        raise KeyError(tokens[0])

    assert await run(small(drop_events=1), unable) == 1
    said = capsys.readouterr().out
    assert failed(said) == ["kv events", "grammar was broken off"]
    assert "orphan freed at the timeout" in said


@pytest.mark.slow
async def test_text_that_leaves_its_grammar_fails_and_one_without_a_backend_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(small(), lambda tokens: "7 sevens") == 1
    assert failed(capsys.readouterr().out) == ["grammar on token 1"]
    assert await run(small(), grammars=False) == 0
    assert "NOT CHECKED" in capsys.readouterr().out


def test_without_the_wheel_it_is_skipped_and_never_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("services.engine.trtllm_engine.verifier.find", lambda: None)
    assert main(["--engine", "tensorrt-llm", "--device", "cpu"]) == SKIPPED
    assert capsys.readouterr().out == "skipped: no wheel\n"


def test_a_package_that_is_another_one_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package.write(tmp_path, lambda name, text: text.replace("1.2.1", "1.3.0"))
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--engine", "tensorrt-llm", "--device", "cpu"]) == 1
    assert capsys.readouterr().out == "failed\nversion: version.py says '1.3.0', not 1.2.1\n"


def test_statistics_must_have_what_is_read_and_the_rest_is_told() -> None:
    good, said = of_statistics([STATISTICS])
    assert good
    assert "top.timestamp" in said
    assert of_statistics([{**STATISTICS, "news": 1}, '{"iterLatencyMS": 1}'])[0] is False
    assert "top.news" in of_statistics([{**STATISTICS, "news": 1}])[1]
    assert of_statistics([{**STATISTICS, "kvCacheStats": None}])[1].startswith("1 items; lacking ['kvCacheStats.usedNumBlocks'")
    assert of_statistics([]) == (False, "there are none")


def stored(number: int, tokens: Sequence[int], parent: int | None) -> dict[str, Any]:
    block = {"block_hash": number, "tokens": [{"token_id": token, "token_extra_id": 0} for token in tokens]}
    return {"event_id": number, "window_size": 64, "data": {"type": "stored", "parent_hash": parent, "blocks": [block]}}


def test_events_must_be_the_prompts_blocks_one_after_another() -> None:
    first, second = stored(0, [1, 2], None), stored(1, [3, 4], 0)
    assert of_events([first, second], [1, 2, 3, 4], 2)[0]
    assert of_events([first], [1, 2, 3, 4], 2) == (False, "1 events ['stored']: 1 of 2 blocks known, 0 gaps, unrecorded []")
    assert "1 gaps" in of_events([first, {**second, "event_id": 5}], [1, 2, 3, 4], 2)[1]
    assert of_events([{"event_id": 0, "data": {}}], [1, 2], 2)[0] is False
    assert of_events([], [1, 2], 2)[0] is False
