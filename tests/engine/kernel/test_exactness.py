"""A row's logits are bitwise the same whatever the rest of the step, the cut of its prompt, threads, blocks, phase, machine."""

from __future__ import annotations

import itertools
import platform
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.torch_engine.config import load_config
from services.engine.torch_engine.kernel.compiler import SOURCE, build, find_compiler
from services.engine.torch_engine.kernel.library import DType, Library
from services.engine.torch_engine.kernel.selftest import is_exact
from tests.engine.kernel.conftest import AVX2, PLAIN, compiled, machine
from tests.engine.kernel.rig import Machine, Piece, tensors_in
from tests.engine.torch_engine import tiny


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Lengths of prompts; steps of pieces (which prompt, how many tokens) until all are computed, in any mixture."""
    lengths = draw(st.lists(st.integers(1, 75), min_size=1, max_size=6))
    left, steps = list(lengths), []
    while any(left):
        order = draw(st.permutations([number for number, count in enumerate(left) if count]))
        taken = order[: draw(st.integers(1, len(order)))]
        step = [(number, draw(st.one_of(st.just(1), st.integers(1, left[number]), st.just(left[number])))) for number in taken]
        for number, count in step:
            left[number] -= count
        steps.append(step)
        if len(steps) > 12:
            steps.append([(number, count) for number, count in enumerate(left) if count])
            left = [0] * len(left)
    return lengths, [step for step in steps if step]


@pytest.mark.parametrize("which", ["half_gqa", "half_wide"])
@pytest.mark.parametrize("target", ["native", "plain"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules(), threads=st.lists(st.integers(1, 3), min_size=14, max_size=14), seed=st.integers(0, 99))
def test_any_schedule_gives_the_logits_of_each_prompt_alone(
    request: pytest.FixtureRequest,
    library: Library,
    which: str,
    target: str,
    schedule: tuple[list[int], list[list[tuple[int, int]]]],
    threads: list[int],
    seed: int,
) -> None:
    model: tiny.Tiny = request.getfixturevalue(which)
    lengths, steps = schedule
    with machine(library if target == "native" else compiled(PLAIN), model, seed=seed) as shared:
        prompts = [tiny.prompt(number, length) for number, length in enumerate(lengths)]
        alone = [shared.whole(prompt) for prompt in prompts]
        sequences = [shared.tokens(prompt) for prompt in prompts]
        for count, step in zip(threads, steps, strict=False):
            logits = shared.step(*(Piece(sequences[number], size) for number, size in step), threads=count)
            assert logits is not None
            for row, (number, _) in zip(logits, step, strict=True):
                assert row.tobytes() == alone[number][sequences[number].computed - 1].tobytes()


@pytest.mark.parametrize("rows", [*range(1, 27), 48, 64])
def test_every_number_of_decoding_rows(library: Library, half_gqa: tiny.Tiny, rows: int) -> None:
    """Each is a code path of its own: how many rows a product takes at once."""
    with machine(library, half_gqa) as shared:
        prompts = [tiny.prompt(number, 9 + number % 5) for number in range(rows)]
        alone = [shared.whole(prompt)[-1].tobytes() for prompt in prompts]
        sequences = [shared.tokens(prompt) for prompt in prompts]
        for sequence in sequences:
            shared.step(Piece(sequence, len(sequence.ids) - 1))
        for threads in (1, 2, 3):
            logits = shared.step(*(Piece(sequence, 1) for sequence in sequences), threads=threads)
            assert logits is not None
            assert [row.tobytes() for row in logits] == alone
            for sequence in sequences:
                sequence.computed -= 1


def test_threads_that_come_and_go_in_the_midst_of_steps(library: Library, half_gqa: tiny.Tiny) -> None:
    with machine(library, half_gqa) as shared:
        prompt = tiny.prompt(2, 100)
        alone, over = shared.whole(prompt).tobytes(), threading.Event()

        def meddle() -> None:
            for number in itertools.cycle((1, 3, 2)):
                if over.is_set():
                    return
                shared.model.invite(number)

        meddler = threading.Thread(target=meddle)
        meddler.start()
        try:
            for turn in range(40):
                sequence = shared.tokens(prompt)
                logits = shared.step(Piece(sequence, 100, 100), threads=1 + turn % 3)
                assert logits is not None
                assert logits.tobytes() == alone
                shared.free += sequence.blocks
        finally:
            over.set()
            meddler.join(30)


def test_float32_kv_memory_is_as_exact(library: Library, half_gqa: tiny.Tiny) -> None:
    with Machine(library, load_config(half_gqa.files.config), tensors_in(half_gqa.files.folder), kv_dtype=DType.F32) as shared:
        prompt = tiny.prompt(1, 70)
        alone, sequence = shared.whole(prompt), shared.tokens(prompt)
        for count in (17, 1, 30, 22):
            logits = shared.step(Piece(sequence, count), threads=2)
            assert logits is not None
            assert logits[0].tobytes() == alone[sequence.computed - 1].tobytes()


def test_kv_is_the_same_bytes_however_it_was_computed(library: Library, half_gqa: tiny.Tiny) -> None:
    """So a block can come from a handoff or the prefix cache."""
    with machine(library, half_gqa) as shared:
        prompt = tiny.prompt(1, 48)
        whole, cut = shared.tokens(prompt), shared.tokens(prompt)
        shared.step(Piece(whole, 48))
        for count in (1, 20, 5, 22):
            shared.step(Piece(cut, count), threads=2)
        assert np.array_equal(shared.kv[whole.blocks], shared.kv[cut.blocks])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares two instruction sets of x86")
@pytest.mark.parametrize("which", ["half_gqa", "half_wide"])
def test_machines_with_and_without_avx512_agree(request: pytest.FixtureRequest, library: Library, which: str) -> None:
    other = compiled(AVX2)
    if library.isa == "plain":
        pytest.skip("this machine has no AVX2")
    model: tiny.Tiny = request.getfixturevalue(which)
    assert other.isa == "avx2"
    with machine(library, model) as here, machine(other, model) as there:
        prompt = tiny.prompt(1, 150)
        assert here.whole(prompt).tobytes() == there.whole(prompt).tobytes()
        assert np.array_equal(here.kv, there.kv)


def test_the_self_test_passes_here(library: Library) -> None:
    assert is_exact(library)


def test_the_self_test_sees_a_kernel_that_treats_many_rows_differently(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in SOURCE.iterdir():
        (source / file.name).write_text(file.read_text())
    text = (source / "product.h").read_text()
    broken = text.replace("lanes_all(x[r * x_step + k])", "lanes_all(x[r * x_step + k] * (rows > 3 ? 1.000001f : 1.0f))")
    assert broken != text
    (source / "product.h").write_text(broken)
    assert not is_exact(Library(build(tmp_path, find_compiler(), source=source)))
