"""Prompt lookup decoding: what may come next is guessed from what came before; how far to guess is a policy.

Pure functions; they know no model. Invariant: a draft changes when a token is drawn, never which one: each is drawn by the usual
rule from its own logits, and what was computed behind the first wrong guess is thrown away.
Sources: A. Saxena, Prompt Lookup Decoding, 2023; speculative decoding, arXiv 2211.17192; copying with overlap, LZ77.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ROWS = 8
"""Rows up to which a step costs little more than its weights do; beyond, a wrong guess takes time from everybody."""
FIRST_LIMIT = 4
_LONGEST = 4
_SHORTEST = 2
_ID_BYTES = array("I").itemsize


def propose(ids: Sequence[int], most: int) -> tuple[int, ...]:
    """`most` ids that may follow `ids`, or none: what followed the last earlier place of its last 4, 3 or 2 ids.

    Where that place overlaps the end, the guess goes on with itself: of a repetition, its next rounds.
    """
    packed = array("I", ids).tobytes()
    for length in range(min(_LONGEST, len(ids) - 1), _SHORTEST - 1, -1):
        place = _last_place(packed, length)
        if place is not None:
            period = len(ids) - (place + length)
            tail = ids[-period:]
            return tuple(tail[position % period] for position in range(most))
    return ()


def allowed(limit: int, rows: int, most: int) -> int:
    """How many ids to guess for each of `rows` sequences of a step. `limit`: as `next_limit` says; `most`: what is configured."""
    return max(0, min(limit, most, ROWS // max(1, rows) - 1))


def next_limit(drafted: int, right: int) -> int:
    """How many ids to guess next time, at most: twice as many after a guess that was right, else one more than were."""
    return 2 * drafted if right == drafted else right + 1


def _last_place(packed: bytes, length: int) -> int | None:
    """Where the last `length` ids of `packed` are found before, counted in ids; the last such place."""
    needle = packed[-length * _ID_BYTES :]
    place = packed.rfind(needle, 0, len(packed) - _ID_BYTES)
    while place % _ID_BYTES:  # between two ids; -1, not found, is such a place too
        if place < 0:
            return None
        place = packed.rfind(needle, 0, place + len(needle) - 1)
    return place // _ID_BYTES
