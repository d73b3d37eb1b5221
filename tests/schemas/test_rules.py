"""Identities, subjects, states and errors."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import errors
from schemas.errors import HeadraceError, IllegalTransition, InternalError, from_code
from schemas.identity import is_job, is_process, job_id, process_id, process_name, replaces, run_id
from schemas.job import pack_ids, unpack_ids
from schemas.lifecycle import TERMINAL, TRANSITIONS, State, advance
from schemas.reply import PROMPT, Frame, Logprob
from schemas.subjects import Subjects, name_token

LOGPROB = Logprob(token=5, logprob=-1.0)
WALL = 1_795_970_000.0


def test_a_later_start_of_a_name_replaces_an_earlier_one() -> None:
    random = Random(1)
    first, second = (process_id("d1", WALL + at, random) for at in (0, 0.001))
    other = process_id("d2", WALL + 1, random)
    assert replaces(second, first)
    assert not replaces(first, second)
    assert not replaces(other, first)
    assert not replaces(first, first)
    assert not replaces("nonsense", first)
    assert is_process(first)
    assert process_name(first) == "d1"


@pytest.mark.parametrize("name", ["", "D1", "a.b", "a-b", "a b", "1a", "x" * 33, "a>"])
def test_a_process_name_that_is_no_subject_token_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="process name"):
        process_id(name, WALL, Random(1))


def test_jobs_and_runs() -> None:
    random = Random(2)
    assert is_job(job_id(random))
    assert all(0 < run_id(random) < 2**64 for _ in range(100))


@given(st.text(min_size=1), st.text(min_size=1))
def test_model_tokens_are_one_token_each_and_never_collide(a: str, b: str) -> None:
    assert not set(name_token(a)) & set(" .*>\t\r\n")
    assert (name_token(a) == name_token(b)) == (a == b)


def test_subjects_share_one_prefix() -> None:
    subjects = Subjects("prod")
    assert subjects.submit("llama-3.1") == "prod.submit.llama-3=2E1"
    assert subjects.job("m", "paid", 3, "j") == "prod.jobs.m.paid.3.j"
    assert subjects.control("d1-x") == "prod.ctl.d1-x"


def test_states_only_go_forward() -> None:
    order = [State.SUBMITTED, State.QUEUED, State.PREFILLING, State.HANDING_OFF, State.DECODING]
    for position, state in enumerate(order):
        for earlier in order[: position + 1]:
            with pytest.raises(IllegalTransition):
                advance(state, earlier)
        for later in (*order[position + 1 :], *TERMINAL):
            assert advance(state, later) is later
    for ended in TERMINAL:
        for state in State:
            with pytest.raises(IllegalTransition):
                advance(ended, state)
    assert set(TRANSITIONS) == set(State)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_ids_are_little_endian() -> None:
    assert pack_ids([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_every_error_has_its_place_in_the_envelope_and_comes_back_from_its_code() -> None:
    classes = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, HeadraceError)}
    codes = [cls.code for cls in classes if cls is not HeadraceError and "code" in vars(cls)]
    assert len(codes) == len(set(codes))
    for cls in classes:
        assert 400 <= cls.status < 600
        assert cls.type
        if "code" in vars(cls) and cls.code is not None and cls is not HeadraceError:
            assert type(from_code(cls.code, "x")) is cls
    unknown = from_code("of_the_future", "text", retry_after=2.0)
    assert isinstance(unknown, InternalError)
    assert (unknown.message, unknown.retry_after) == ("text", 2.0)


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"logprobs": (LOGPROB, LOGPROB)}, True),
        ({"logprobs": (LOGPROB,)}, False),
        ({"index": -1}, False),
        ({"choice": PROMPT, "index": 1, "logprobs": (LOGPROB, LOGPROB)}, True),
        ({"choice": PROMPT, "index": 0, "logprobs": (LOGPROB, LOGPROB)}, False),
        ({"choice": PROMPT, "index": 1}, False),
        ({"choice": PROMPT - 1}, False),
    ],
)
def test_a_frame_says_one_thing_a_token(changes: dict[str, Any], good: bool) -> None:
    fields = {"run": 1, "job": "f" * 32, "attempt": 1, "hop": 1, "index": 0, "tokens": (5, 6)} | changes
    if good:
        Frame(**fields)
    else:
        with pytest.raises(ValueError, match=r"logprob|range"):
            Frame(**fields)
