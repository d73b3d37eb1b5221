"""Every message survives the wire; nothing is half-read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import OLDEST_SCHEMA, SCHEMA, Message, decode, decode_json, encode, encode_json
from schemas.control import CancelJob
from schemas.errors import UnreadableMessage, UnsupportedSchema
from schemas.handoff import Handoff
from schemas.job import Job
from schemas.placement import Accepted, Lease, Placement, Queue, Refused, SubmitAnswer
from schemas.reply import Digest, Frames, Reply
from schemas.state import Death, EdgeBeat, QueueReport, WorkerState
from tests.schemas.samples import every, job

ALL = every()
IDS = [type(message).__name__ for message in ALL]


def kinds(base: type) -> set[type]:
    return {base} | {kind for child in base.__subclasses__() for kind in kinds(child)}


def wire(message: Message, **changed: object) -> bytes:
    """The message as a map, with fields changed, added or (None) taken out."""
    fields = msgspec.msgpack.decode(encode(message)) | changed
    return msgspec.msgpack.encode({name: value for name, value in fields.items() if value is not None})


def test_the_samples_are_complete() -> None:
    of_ours = {kind for kind in kinds(Message) if kind.__module__.startswith("schemas.")} - {Message}
    assert {type(message) for message in ALL} == {kind for kind in of_ours if kind.__module__ != "schemas.transfer"}


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_a_message_survives_the_wire_whole(message: Message) -> None:
    assert decode(encode(message), type(message)) == message
    assert decode_json(encode_json(message), type(message)) == message
    defaults = {name for name, value in msgspec.structs.asdict(message).items() if value == _default(type(message), name)}
    assert not defaults - {"schema"}, "the sample shows nothing for these fields"


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_every_message_says_its_schema(message: Message) -> None:
    assert msgspec.msgpack.decode(encode(message))["schema"] == SCHEMA
    with pytest.raises(UnreadableMessage):
        decode(wire(message, schema=None), type(message))


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_unknown_fields_are_ignored(message: Message) -> None:
    assert decode(wire(message, field_of_the_future={"a": [1]}), type(message)) == message


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_other_schema_versions_are_refused(message: Message) -> None:
    for schema in (OLDEST_SCHEMA - 1, SCHEMA + 1, -1, 2**63):
        with pytest.raises(UnsupportedSchema):
            decode(wire(message, schema=schema), type(message))


def test_a_newer_schema_is_named_even_when_its_fields_changed() -> None:
    with pytest.raises(UnsupportedSchema):
        decode(msgspec.msgpack.encode({"schema": SCHEMA + 1, "process": {"now": "a map"}}), Death)


@pytest.mark.parametrize("message", ALL, ids=IDS)
def test_every_cut_is_refused(message: Message) -> None:
    data = encode(message)
    for length in range(len(data)):
        with pytest.raises(UnreadableMessage):
            decode(data[:length], type(message))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for kind in (Job, Frames, Death):
        with pytest.raises(UnreadableMessage):
            decode(data, kind)


@given(st.data())
def test_a_flipped_byte_is_refused_or_gives_a_whole_message(data: st.DataObject) -> None:
    raw = bytearray(encode(job()))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        read = decode(bytes(raw), Job)
    except UnreadableMessage:
        return
    assert decode(encode(read), Job) == read


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(UnreadableMessage):
        decode(b"\x91" * 100_000, Job)


def test_tagged_unions_tell_their_members_apart() -> None:
    by_kind = {type(message): message for message in ALL}
    for kind in (Accepted, Queue, Refused):
        assert decode(encode(by_kind[kind]), SubmitAnswer) == by_kind[kind]
    for kind in (Frames, Digest):
        assert decode(encode(by_kind[kind]), Reply) == by_kind[kind]
    with pytest.raises(UnreadableMessage):
        decode(encode(by_kind[Frames]), SubmitAnswer)


@pytest.mark.parametrize(
    "changed",
    [
        {"job": "x"},
        {"edge": "not-a-process"},
        {"prompt": b""},
        {"prompt": b"123"},
        {"attempt": 0},
        {"lane": 16},
        {"lane": -1},
        {"n": 3},
        {"salt": b"x" * 65},
        {"choices": [{"index": 0, "done": True}, {"index": 1, "done": True}]},
        {"choices": [{"index": 1}, {"index": 0}]},
        {"sampling": {"seed": -1, "max_tokens": 1}},
        {"sampling": {"seed": 1, "max_tokens": 0}},
        {"sampling": {"seed": 1, "max_tokens": 1, "temperature": float("nan")}},
        {"sampling": {"seed": 1, "max_tokens": 1, "top_p": 0.0}},
        {"sampling": {"seed": 1, "max_tokens": 2**40}},
        {"sampling": {"seed": 1, "max_tokens": 1, "logprobs": 10**9}},
        {"sampling": {"seed": 1, "max_tokens": 1, "min_p": float("inf")}},
        {"sampling": {"seed": 1, "max_tokens": 1, "top_k": -1}},
        {"sampling": {"seed": 1, "max_tokens": 1, "stop_token_ids": [2**62]}},
        {"deadlines": {"stamp": float("nan"), "total": 1.0}},
        {"deadlines": {"stamp": 1.0, "total": float("inf")}},
        {"reply_to": ""},
        {"reply_to": "a b"},
        {"reply_to": "hr.reply.*"},
        {"reply_to": "x\r\nPING"},
        {"edge": "e1-mx235xkkixxjc\n"},
        {"n": 1000, "choices": [{"index": i} for i in range(1000)]},
        {"tier": "platinum"},
        {"attempt": "2"},
    ],
    ids=str,
)
def test_a_job_that_cannot_be_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(UnreadableMessage):
        decode(wire(job(), **changed), Job)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (WorkerState, {"process": "a b"}),
        (WorkerState, {"process": ""}),
        (WorkerState, {"block_tokens": 0}),
        (WorkerState, {"context_length": -1}),
        (WorkerState, {"kv_total": -1}),
        (WorkerState, {"sent": float("nan")}),
        (EdgeBeat, {"sent": float("inf")}),
        (EdgeBeat, {"process": "e1"}),
        (Placement, {"decode": "a b"}),
        (Handoff, {"prefill": "x.y"}),
        (CancelJob, {"remember_s": float("inf")}),
        (CancelJob, {"remember_s": -1.0}),
        (QueueReport, {"drain_rate": float("nan")}),
        (Lease, {"items": [{"run": 1, "verb": "reserve", "blocks": -5}]}),
        (Lease, {"items": [{"run": 1, "verb": "renew"}] * 5000}),
    ],
    ids=str,
)
def test_what_a_peer_of_ours_would_not_say_is_refused(kind: type[Message], changed: dict[str, object]) -> None:
    sample = next(message for message in ALL if type(message) is kind)
    with pytest.raises(UnreadableMessage):
        decode(wire(sample, **changed), kind)


def _default(kind: type[Message], name: str) -> object:
    field = next(field for field in msgspec.structs.fields(kind) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
