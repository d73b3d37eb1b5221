"""What an operator asks of a verb, as JSON. Must not know which verbs there are.

Invariant: what cannot be read, or is not asked here, is refused with what is wrong with it; nothing of it is heeded.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from schemas.codec import decode_json
from services.bus.interface import Msg
from services.bus.micro_endpoint import Answer, ServiceHandler

Q = TypeVar("Q")


class EmptyQuestion(msgspec.Struct, forbid_unknown_fields=True):
    pass


def read(data: bytes, kind: type[Q]) -> Q:
    """What was asked; nothing at all asks for what is usual. Raises `UnreadableMessage`."""
    return decode_json(data or b"{}", kind)


def asks_nothing(handler: ServiceHandler) -> ServiceHandler:
    """A verb without a question: whoever sends one all the same means something that would not be done."""

    async def asked(msg: Msg) -> Answer:
        read(msg.data, EmptyQuestion)
        return await handler(msg)

    return asked
