"""Records cut into messages that the bus takes. A pure function; it estimates sizes, so that nothing is encoded twice."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.reply import Frame

PARCEL = 256 * 1024
"""Bytes of a message, far below the largest payload that NATS takes by default, 1 MiB."""
_FRAME_BYTES = 256
_LOGPROB_BYTES = 48
_VALUE_BYTES = 16


def parcels(frames: Sequence[Frame]) -> list[tuple[Frame, ...]]:
    """The frames in order, in messages of at most about `PARCEL` bytes; one at least, which may be empty."""
    found: list[list[Frame]] = [[]]
    room = PARCEL
    for frame in frames:
        size = _FRAME_BYTES + _VALUE_BYTES * len(frame.tokens)
        size += sum(_LOGPROB_BYTES + _VALUE_BYTES * len(logprob.top) for logprob in frame.logprobs)
        if size > room and found[-1]:
            found.append([])
            room = PARCEL
        found[-1].append(frame)
        room -= size
    return [tuple(parcel) for parcel in found]
