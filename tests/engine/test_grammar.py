"""Grammars through the step loop with a scripted engine: whatever is drawn, what ends is valid; nobody else notices."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from schemas.errors import UnsupportedParameter
from schemas.handoff import FirstToken
from schemas.job import Choice, Grammar, Sampling
from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.clock import SystemClock
from services.engine.build import build_scripted
from services.engine.core import StepEngine
from services.engine.protocol import RunSpec
from services.engine.scripted import Script, ScriptedRunner
from services.kv.holders import RunHolder
from services.models.store import ModelStore
from services.settings.settings import Settings
from services.text.grammar import compile_grammar, model_vocabulary
from services.text.grammar_cache import Compiled, GrammarCache
from tests.engine.torch_engine.rig import Running, copy_blocks
from tests.text.tiny import CONFIG, END, byte_ids, tiny_tokenizer, tiny_tokenizer_json, write_tiny_model_folder
from tests.waiting import until

REGEX = Grammar(kind="regex", source="(red|green|blue)(, (red|green|blue)){2,9}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def engine(folder: Path, **scripted: Any) -> StepEngine:
    files = ModelStore(folder.parent).open(str(folder), weights=False)
    return build_scripted(files, Settings(scripted=scripted), SystemClock())


def spec(run: int, grammar: Grammar | None, *, generated: tuple[int, ...] = (), n: int = 1, **sampling: Any) -> RunSpec:
    drawn = Sampling(**{"seed": 5, "max_tokens": 200, "grammar": grammar} | sampling)
    return RunSpec(
        run, tuple(byte_ids("an answer, please")), tuple(Choice(index=i, generated=generated) for i in range(n)), drawn
    )


def text(ids: list[int]) -> str:
    return tiny_tokenizer().decode(ids)


def finish(running: Running, run: int, choice: int = 0) -> FinishReason | None:
    return [output.finish for output in running.outputs(run) if output.choice == choice][-1]


# what comes out

VALUES = ["a", "é", 'q"', 7, None, True]
small = st.integers(0, 99)
scalars: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low - 50, "maximum": low - 50 + size}, small, small),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(VALUES), min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, st.sampled_from(["x", 0, {"k": [1]}])),
    st.just({"type": "string", "pattern": "^[a-f]{1,4}$"}),
    st.just({"type": "string", "format": "date"}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, dict[str, Any]], optional: bool) -> dict[str, Any]:
        required = list(properties)[1 if optional else 0 :]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(made, st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.booleans())


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(schema=schemas, seed=st.integers(0, 2**32))
async def test_what_ends_is_valid(folder: Path, schema: dict[str, Any], seed: int) -> None:
    grammar = Grammar(kind="json_schema", source=json.dumps(schema))
    async with Running(engine(folder)) as running:
        (ids,) = await running.generate(spec(1, grammar, seed=seed, max_tokens=400))
        end = running.end(1)
        assert end is not None
        assert end.state is State.FINISHED
        if finish(running, 1) is FinishReason.STOP:
            jsonschema.validate(json.loads(text(ids)), schema)


async def test_free_json_is_an_object_or_cut(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        specs = [spec(run, Grammar(kind="json_object"), seed=run, max_tokens=300) for run in range(20)]
        answers = await running.generate(*specs)
        ended = [json.loads(text(ids)) for run, ids in enumerate(answers) if finish(running, run) is FinishReason.STOP]
        assert ended
        assert all(isinstance(answer, dict) for answer in ended)


@pytest.mark.parametrize("max_tokens", [1, 7])
async def test_max_tokens_cuts_in_the_middle(folder: Path, max_tokens: int) -> None:
    async with Running(engine(folder)) as running:
        (ids,) = await running.generate(spec(1, REGEX, max_tokens=max_tokens))
        assert len(ids) == max_tokens
        assert finish(running, 1) is FinishReason.LENGTH


@pytest.mark.parametrize("kind", [{"ignore_eos": True}, {"min_tokens": 150}])
async def test_the_grammar_decides_when_an_answer_ends(folder: Path, kind: dict[str, Any]) -> None:
    async with Running(engine(folder)) as running:
        (ids,) = await running.generate(spec(1, Grammar(kind="regex", source="[ab]{3}"), **kind))
        assert len(text(ids)) == 3
        assert finish(running, 1) is FinishReason.STOP


async def test_a_script_gives_way_to_the_grammar(folder: Path, tmp_path: Path) -> None:
    said = Script(prompt_contains=tuple(byte_ids("answer")), tokens=tuple(byte_ids("green, x")))
    path = tmp_path / "scripts.json"
    path.write_text(json.dumps([{"prompt_contains": said.prompt_contains, "tokens": said.tokens}]))
    async with Running(engine(folder, scripts=path)) as running:
        (ids,) = await running.generate(spec(1, REGEX))
        assert text(ids).startswith("green, ")
        assert set(text(ids).split(", ")) <= {"red", "green", "blue"}


# where it goes on


async def test_a_resume_goes_on_with_the_same_tokens(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        (whole,) = await running.generate(spec(1, REGEX))
        for run, done in enumerate(range(1, len(whole), 3), start=2):
            (rest,) = await running.generate(spec(run, REGEX, generated=tuple(whole[:done])))
            assert whole[:done] + rest == whole


async def test_a_handoff_changes_no_token(folder: Path) -> None:
    async with Running(engine(folder)) as prefill, Running(engine(folder)) as decode:
        (local,) = await prefill.generate(spec(1, REGEX))
        prefill.engine.prefill(spec(2, REGEX))
        first = await prefill.prefilled(2)
        copy_blocks(prefill.engine, decode.engine, 2)
        decode.engine.decode(spec(2, REGEX), (first,), cached_tokens=0, compute_s=0.0)
        await decode.ended(2)
        assert [first.token, *decode.tokens(2)] == local
        assert finish(decode, 2) is FinishReason.STOP


async def test_each_of_several_choices_has_its_own_place(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        await running.generate(spec(1, REGEX, n=3))
        answers = [text([o.token for o in running.outputs(1) if o.choice == choice]) for choice in range(3)]
        assert len(set(answers)) == 3
        assert all(set(answer.split(", ")) <= {"red", "green", "blue"} for answer in answers)
        assert all(finish(running, 1, choice) is FinishReason.STOP for choice in range(3))


# what goes wrong


async def test_a_bad_grammar_ends_its_own_run_with_a_code(folder: Path) -> None:
    bad = Grammar(kind="regex", source="(?<=x)*")
    async with Running(engine(folder)) as running:
        for run, grammar in enumerate((None, bad, REGEX)):
            running.engine.prefill(spec(run, grammar), then_decode=True)
        await running.ended(0, 1, 2)
        ends = [running.end(run) for run in range(3)]
    assert [end and (end.state, end.code) for end in ends] == [
        (State.FINISHED, ""),
        (State.FAILED, "invalid_value"),
        (State.FINISHED, ""),
    ]


async def test_a_bad_grammar_ends_a_run_that_was_handed_over(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        running.engine.pool.allocate(RunHolder(1), 2)
        bad = spec(1, Grammar(kind="regex", source="("))
        running.engine.decode(bad, (FirstToken(choice=0, index=0, token=20),), cached_tokens=0, compute_s=0.0)
        await running.ended(1)
        end = running.end(1)
        assert end is not None
        assert (end.state, end.code) == (State.FAILED, "invalid_value")


async def test_ids_that_the_grammar_never_took_end_their_own_run(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        running.engine.prefill(spec(1, REGEX, generated=tuple(byte_ids("purple"))), then_decode=True)
        running.engine.prefill(spec(2, REGEX), then_decode=True)
        await running.ended(1, 2)
        ends = [running.end(1), running.end(2)]
    assert [end and (end.state, end.code) for end in ends] == [(State.FAILED, "invalid_value"), (State.FINISHED, "")]


class Slow:
    """An engine that compiles nothing before the test says so."""

    def __init__(self, folder: Path) -> None:
        self.go = threading.Event()
        made = engine(folder)
        runner = ScriptedRunner(made.pool, block_tokens=16, vocab=range(4, 260), eos_id=END)
        vocabulary = model_vocabulary(tiny_tokenizer_json(), CONFIG["vocab_size"], frozenset({END}))
        grammars = GrammarCache(vocabulary, budget_s=60, compile_=self._compile)
        self.engine = StepEngine(made.info, made.pool, runner, made._scheduler, SystemClock(), grammars)

    def _compile(self, grammar: Grammar, vocabulary: LLTokenizer) -> Compiled:
        self.go.wait(60)
        return compile_grammar(grammar, vocabulary)


async def test_others_run_and_the_prompt_is_computed_while_a_grammar_compiles(folder: Path) -> None:
    slow = Slow(folder)
    async with Running(slow.engine) as running:
        running.engine.prefill(spec(1, REGEX), then_decode=True)
        await running.generate(spec(2, None))
        (waiting,) = running.engine._runs.of(1)
        assert waiting.computed == len(waiting.ids) - 1
        assert running.outputs(1) == []
        slow.go.set()
        await running.ended(1)
        assert finish(running, 1) is FinishReason.STOP


async def test_a_run_is_cancelled_while_its_grammar_compiles(folder: Path) -> None:
    slow = Slow(folder)
    async with Running(slow.engine) as running:
        running.engine.prefill(spec(1, REGEX), then_decode=True)
        await until(lambda: running.engine._runs.of(1)[0].uncomputed == 1, what="the prompt but its last token")
        running.engine.cancel(1)
        await running.ended(1)
        slow.go.set()
        await asyncio.sleep(0)
        end = running.end(1)
        assert end is not None
        assert end.state is State.CANCELLED
        assert len(await running.generate(spec(2, None))) == 1


async def test_a_kind_the_engine_does_not_have_is_refused(folder: Path) -> None:
    async with Running(engine(folder)) as running:
        with pytest.raises(UnsupportedParameter):
            running.engine.prefill(spec(1, Grammar(kind="xml", source="<a/>")))
