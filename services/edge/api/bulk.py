"""How much a JSON text holds, told from its bytes before anything is made of it.

What makes a body costly is not its length but how many small things it holds: one string of 4 MB is read in milliseconds, a
million arrays in one another hold up the event loop, and with it every stream of this process, for a second. A thread would not
help: the decoders keep the GIL. Invariants: looking costs a few milliseconds for 4 MB, whatever they are; no valid JSON is
counted wrongly, and of what is none at least all that stands before its fault is counted.
"""

from __future__ import annotations

MOST_PARTS = 2**16
"""Objects, arrays and strings, names included, of one body: 13,000 messages of one text each."""
MOST_VALUES = 2**20
"""Commas: as good as the values of all objects and arrays. More token ids than the prompts of one request have."""
_ESCAPED = b"\\\\", b'\\"'
_ALL_BUT_PARTS = bytes(set(range(256)) - set(b'[{"'))


def too_many(body: bytes) -> bool:
    """Whether `body` holds more than `MOST_PARTS` or `MOST_VALUES`. Only one with many such characters is looked at closely."""
    if len(body) <= MOST_PARTS:
        return False
    if len(body.translate(None, _ALL_BUT_PARTS)) <= MOST_PARTS and body.count(b",") <= MOST_VALUES:
        return False
    for escaped in _ESCAPED:
        body = body.replace(escaped, b"")
    strings = body.count(b'"') // 2
    if strings > MOST_PARTS:
        return True
    outside = b"".join(body.split(b'"')[::2])
    return strings + outside.count(b"[") + outside.count(b"{") > MOST_PARTS or outside.count(b",") > MOST_VALUES
