"""How records become messages: together, in order, and none too large for the bus."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.codec import encode
from schemas.reply import Frame, Frames, Logprob
from services.worker.parcels import PARCEL, parcels

LIMIT = 2**20
"""What NATS takes by default."""


def frame(index: int, tokens: int, alternatives: int | None = None) -> Frame:
    ids = tuple(range(100_000, 100_000 + tokens))
    top = tuple((100_000 + place, -0.123456789) for place in range(alternatives or 0))
    logprobs = tuple(Logprob(token=token, logprob=-1.23456789, top=top, rank=70_000) for token in ids)
    none: tuple[Logprob, ...] = ()
    return Frame(
        run=2**63, job="f" * 32, attempt=1, hop=1, index=index, tokens=ids, logprobs=none if alternatives is None else logprobs
    )


def size(frames: Sequence[Frame]) -> int:
    return len(encode(Frames(process="p" * 40, frames=tuple(frames))))


def test_one_message_for_what_fits() -> None:
    frames = [frame(at, 1) for at in range(200)]
    assert parcels(frames) == [tuple(frames)]
    assert parcels([]) == [()], "for events alone"


def test_long_replays_are_cut_in_order() -> None:
    for frames in ([frame(1 + 32 * at, 32, 20) for at in range(256)], [frame(at, 1, 20) for at in range(1024)]):
        assert size(frames) > PARCEL
        found = parcels(frames)
        assert [one for parcel in found for one in parcel] == frames
        assert max(map(size, found)) < LIMIT / 2
        assert len(found) < size(frames) / PARCEL * 3


def test_a_frame_is_never_cut() -> None:
    large = frame(1, 2000, 20)
    assert parcels([large, large]) == [(large,), (large,)]
