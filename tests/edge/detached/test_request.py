"""A detached job's request in its row, read by edges of this build and of older ones."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from schemas.codec import Message, decode, encode
from schemas.errors import UnreadableMessage
from services.edge.detached.request import pack, unpack
from services.edge.store.records import ROWS
from tests.edge.cluster import draft


class OlderDraft(msgspec.Struct, frozen=True, kw_only=True):
    """It has no adapter."""

    model: str


class OlderRequest(Message, frozen=True, kw_only=True):
    draft: OlderDraft


@pytest.mark.parametrize("adapter", [None, "sql"])
def test_what_is_packed_comes_back(adapter: str | None) -> None:
    asked = replace(draft(), adapter=adapter)
    assert unpack(pack(asked)) == asked


def test_an_older_edge_reads_what_it_can_compute_and_refuses_an_adapter() -> None:
    """It would drop the adapter's name and answer with the plain model."""
    assert decode(pack(draft()), OlderRequest, ROWS).draft.model == draft().model
    with pytest.raises(UnreadableMessage):
        decode(pack(replace(draft(), adapter="sql")), OlderRequest, ROWS)


def test_an_adapter_in_a_row_of_an_earlier_build_is_read() -> None:
    class EarlierRequest(Message, frozen=True, kw_only=True):
        draft: object

    asked = replace(draft(), adapter="sql")
    assert unpack(encode(EarlierRequest(draft=asked))) == asked


def test_a_row_without_a_request_is_unreadable() -> None:
    with pytest.raises(UnreadableMessage):
        unpack(encode(Message()))
