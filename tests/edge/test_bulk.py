"""Bodies that are within their limit of bytes and hold very many small things, or seem to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.api import body, bulk
from services.edge.api.errors import BadRequest
from tests.edge.fakes import Api
from tests.edge.test_api_refusals import check

TEXT = st.text(st.sampled_from('ab\\"{}[],: é\n'), max_size=6)
JSON = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Its objects, arrays and strings; the commas between its values."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    inner = value if isinstance(value, list) else [*value, *value.values()]
    parts, commas = zip((1, max(0, len(value) - 1)), *map(counted, inner), strict=True)
    return sum(parts), sum(commas)


@pytest.mark.parametrize("ascii_only", [True, False])
@given(value=JSON)
def test_what_a_text_holds_is_told_from_its_bytes(ascii_only: bool, value: Any) -> None:
    """Whatever stands in its strings. Blanks at the end are no part of it: they only make it long enough to be looked at."""
    text = json.dumps(value, ensure_ascii=ascii_only).encode() + b" " * bulk.MOST_PARTS
    parts, commas = counted(value)
    with pytest.MonkeyPatch.context() as patch:
        for most_parts, most_values in ((parts, commas), (parts - 1, commas), (parts, commas - 1)):
            patch.setattr(bulk, "MOST_PARTS", most_parts)
            patch.setattr(bulk, "MOST_VALUES", most_values)
            assert bulk.too_many(text) == (parts > most_parts or commas > most_values)


def holding(unit: bytes, times: int) -> bytes:
    return b'{"a":[' + b",".join([unit] * times) + b"]}"


CROWDED = {
    "empty arrays": holding(b"[]", 2**16),
    "nested arrays": holding(b"[" * 60 + b"]" * 60, 2000),
    "objects": holding(b'{"a":1}', 2**15),
    "strings": holding(b'""', 2**16),
    "names": b"{" + b",".join(b'"%d":0' % name for name in range(2**16)) + b"}",
    "numbers": holding(b"1", 2**20 + 2),
    "broken at its end": holding(b"[]", 2**16)[:-2],
}


@pytest.mark.parametrize("text", CROWDED.values(), ids=CROWDED)
async def test_a_body_of_too_many_parts_is_refused(text: bytes) -> None:
    refused = await Api().post(text)
    check(refused, 400, code="invalid_request_body")
    assert "holds more than" in refused.json()["error"]["message"]


ROOMY = {
    "ids of a long prompt": holding(b"31000", 600_000),
    "one text of what looks like parts": b'{"a":"' + b'{}[],\\"' * 500_000 + b'"}',
    "one text of escapes": b'{"a":"' + b"\\\\" * 2_000_000 + b'"}',
    "many messages": holding(b'{"role":"user","content":[{"type":"text","text":"hi"}]}', 6500),
}


@pytest.mark.parametrize("text", ROOMY.values(), ids=ROOMY)
def test_what_only_is_long_is_read(text: bytes) -> None:
    assert body.parse(text) == json.loads(text)


@given(st.binary(max_size=50))
def test_what_is_no_json_is_refused_all_the_same(text: bytes) -> None:
    with pytest.raises(BadRequest):
        body.parse(b"[" + text + b" " * bulk.MOST_PARTS)
