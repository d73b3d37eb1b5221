"""A verb that is asked nothing."""

from __future__ import annotations

import pytest

from schemas.errors import UnreadableMessage
from services.bus.interface import Msg
from services.bus.micro_endpoint import Answer
from services.bus.questions import asks_nothing


async def done(_: Msg) -> Answer:
    return b"done"


@pytest.mark.parametrize("data", [b"", b"{}", b" {} "])
async def test_nothing_is_answered(data: bytes) -> None:
    assert await asks_nothing(done)(Msg("s", data)) == b"done"


@pytest.mark.parametrize("data", [b'{"drain": true}', b"[]", b"null", b"x", b"\xff", b"[" * 100_000])
async def test_a_question_is_refused(data: bytes) -> None:
    with pytest.raises(UnreadableMessage):
        await asks_nothing(done)(Msg("s", data))
