"""Records cut into messages that the bus takes. A pure function; it estimates sizes, so that nothing is encoded twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from schemas.reply import DigestEntry, Frame

PARCEL = 256 * 1024
"""Bytes of a message, far below the largest payload that NATS takes by default, 1 MiB."""
_FRAME_BYTES = 256
_LOGPROB_BYTES = 48
_VALUE_BYTES = 16
_ENTRY_BYTES = 128
_T = TypeVar("_T")


def parcels(frames: Sequence[Frame]) -> list[tuple[Frame, ...]]:
    """The frames in order, in messages of at most about `PARCEL` bytes; one at least, which may be empty."""
    return _cut(frames, _size_of_frame)


def parcels_of_digest(entries: Sequence[DigestEntry]) -> list[tuple[DigestEntry, ...]]:
    """The same of what a digest says."""
    return _cut(entries, lambda entry: _ENTRY_BYTES + _VALUE_BYTES * len(entry.last))


def _size_of_frame(frame: Frame) -> int:
    size = _FRAME_BYTES + _VALUE_BYTES * len(frame.tokens)
    if frame.logprobs:
        size += sum(_LOGPROB_BYTES + _VALUE_BYTES * len(logprob.top) for logprob in frame.logprobs)
    return size


def _cut(items: Sequence[_T], size_of: Callable[[_T], int]) -> list[tuple[_T, ...]]:
    found: list[list[_T]] = [[]]
    room = PARCEL
    for item in items:
        size = size_of(item)
        if size > room and found[-1]:
            found.append([])
            room = PARCEL
        found[-1].append(item)
        room -= size
    return [tuple(parcel) for parcel in found]
