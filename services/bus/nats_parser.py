"""Reads what a NATS server sends: whole messages at once, everything else as nats-py does.

nats-py matches each line against up to seven patterns and awaits three coroutines a message. Almost all that comes is `MSG`, and
whole. Must not know subjects or message contents. Invariant: a message reaches `deliver` once, in order, whoever parsed it.
Source: NATS client protocol, MSG <subject> <sid> [reply-to] <size>.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from nats.errors import ProtocolError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

Deliver = Callable[[int, bytes, bytes, bytes], object]
"""Subscription, subject, reply subject, payload."""
_LINE_END = b"\r\n"
_log = logging.getLogger("headrace.bus")


class MessageParser(Parser):
    """nats-py's parser, asked only for what does not begin with a whole message."""

    def __init__(self, client: Any, deliver: Deliver) -> None:
        super().__init__(client)
        self._deliver = deliver

    async def parse(self, data: bytes = b"") -> None:
        """Raises `ProtocolError` for what cannot be read, whatever is wrong with it: nats-py connects again after that one, and
        after any other is deaf until its pings are missed."""
        self.nc._pings_outstanding = 0  # a PONG may be behind a second of messages
        is_between_messages = not self.buf and self.state == AWAITING_CONTROL_LINE
        try:
            rest = self._take(data) if is_between_messages else data
            if rest:
                await super().parse(rest)
        except (ProtocolError, OSError):
            raise
        except Exception as error:
            _log.exception("what NATS sent could not be read")
            raise ProtocolError from error

    def _take(self, data: bytes) -> bytes:
        """Delivers the whole messages at the beginning of `data`; what is left."""
        at = 0
        while data.startswith(b"MSG ", at):
            line = data.find(_LINE_END, at)
            words = data[at + 4 : line].split()
            if line < 0 or not 3 <= len(words) <= 4 or not (words[1].isdigit() and words[-1].isdigit()):
                break  # nats-py waits for the rest, or says what is wrong with it
            begin = line + len(_LINE_END)
            end = begin + int(words[-1])
            if len(data) < end + len(_LINE_END):
                break
            self._deliver(int(words[1]), words[0], words[2] if len(words) == 4 else b"", data[begin:end])
            at = end + len(_LINE_END)
        return data[at:]
