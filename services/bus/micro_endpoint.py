"""One endpoint of a service: what it is called, who handles it, and its counts as ADR-32 wants them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from schemas.errors import HeadraceError
from services.bus.interface import Msg
from services.bus.matching import is_pattern

QUEUE_GROUP = "q"
LONGEST_ERROR = 256
LONGEST_TEXT = 2_000
"""Characters of an error that are told: it may repeat what was asked, which may be as long as a message."""
NAME = re.compile(r"^[a-zA-Z0-9_-]+$")

MAX_RUNNING = 64
"""Requests of one endpoint that run at once, if it says nothing else; more are refused as overloaded."""

Answer = bytes | Mapping[str, Any] | msgspec.Struct | None
"""None: the handler has answered by itself."""
ServiceHandler = Callable[[Msg], Awaitable[Answer]]
"""Raise a `HeadraceError` to answer with its status and message; anything else is answered as 500."""


def nobody(_: HeadraceError) -> None:
    """Nobody counts it but the endpoint."""


@dataclass(slots=True)
class Endpoint:
    """One literal subject (`nats micro req` publishes to it) and what happened on it. Times are nanoseconds."""

    name: str
    subject: str
    handler: ServiceHandler
    queue: str
    metadata: dict[str, str]
    most: int = MAX_RUNNING
    on_full: Callable[[HeadraceError], object] = nobody
    running: set[asyncio.Task[None]] = field(default_factory=set)
    num_requests: int = 0
    num_errors: int = 0
    processing_time: int = 0
    last_error: str = ""

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise ValueError(f"endpoint name {self.name!r}: letters, digits, - and _ only")
        if is_pattern(self.subject):
            raise ValueError(f"endpoint subject {self.subject!r} is a pattern")

    def failed(self, error: HeadraceError) -> None:
        self.num_errors += 1
        self.last_error = f"{error.status}:{error.message}"[:LONGEST_ERROR]

    def info(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "metadata": self.metadata,
        }

    def stats(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "num_requests": self.num_requests,
            "num_errors": self.num_errors,
            "last_error": self.last_error,
            "processing_time": self.processing_time,
            "average_processing_time": self.processing_time // max(1, self.num_requests),
        }
