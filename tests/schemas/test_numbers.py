"""No number in a message breaks who reads it: out of range it is refused while decoding, in range it can be computed with."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from schemas.codec import Message, decode
from schemas.errors import UnreadableMessage
from tests.schemas.numbers import Path, floats, numbers, with_number
from tests.schemas.samples import every
from tests.schemas.test_codec import IDS, kinds

ALL = every()
PLACES = [(message, path) for message in ALL for path in numbers(message)]
BELOW_ZERO = {"choice", "choices", "last", "logprob", "top", "logit_bias", "presence_penalty", "frequency_penalty"} | {
    *("ttft_s", "wait_s", "load", "kv", "cost", "schema"),
    *("total", "queue", "first_token"),
    "page",
}
"""Fields, or what they lie in, that may hold less than 0; the schema of a message in another one says nothing."""
CHECKED_BY_HAND = {"Sampling", "schema", "n", "lane"}
"""Structs and fields whose ranges are the API's, not the codec's: `__post_init__` or the codec's version rule has them."""


def readable(message: Message, path: Path, number: float) -> Message | None:
    try:
        return decode(with_number(message, path, number), type(message))
    except UnreadableMessage:
        return None


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_what_is_no_number_is_refused_wherever_it_stands(message: Message) -> None:
    for path in numbers(message):
        for number in (math.nan, math.inf, -math.inf):
            assert readable(message, path, number) is None, (path, number)


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_less_than_nothing_is_refused(message: Message) -> None:
    for path in numbers(message):
        if not BELOW_ZERO.intersection(path):
            assert readable(message, path, -1) is None, path
            assert readable(message, path, -(2**63)) is None, path


@given(st.sampled_from(PLACES), st.integers(-(2**63), 2**64 - 1) | st.floats())
def test_any_number_is_refused_or_can_be_computed_with(place: tuple[Message, Path], number: float) -> None:
    message = readable(*place, number)
    if message is not None:
        assert all(abs(found) <= 1e300 for found in floats(message))
        assert decode(msgspec.msgpack.encode(message), type(message)) == message


def test_every_number_of_a_message_has_a_range() -> None:
    for kind in kinds(Message):
        if kind.__module__.startswith("schemas."):
            assert not list(_without_range(inspect.type_info(kind), kind.__name__))


def _without_range(found: inspect.Type, where: str) -> Iterator[str]:
    match found:
        case inspect.StructType(cls=cls, fields=fields):
            for one in fields:
                if cls.__name__ not in CHECKED_BY_HAND and one.name not in CHECKED_BY_HAND:
                    yield from _without_range(one.type, f"{cls.__name__}.{one.name}")
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for inner in types:
                yield from _without_range(inner, where)
        case inspect.VarTupleType(item_type=inner) | inspect.ListType(item_type=inner):
            yield from _without_range(inner, where)
        case inspect.DictType(value_type=inner):
            yield from _without_range(inner, where)
        case inspect.IntType(ge=None) | inspect.FloatType(ge=None) | inspect.FloatType(le=None):
            yield where
