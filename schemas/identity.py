"""Who is who: processes, jobs, runs.

A process id is `<name>-<start>`; `start` is the start time in milliseconds (8 base-36 digits) and 5 random ones, so ids of one
name sort by age and are never reused. A job is 128 random bits in hex. A run is 64 random bits.
"""

from __future__ import annotations

import re
from random import Random

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,31}\Z")
_PROCESS = re.compile(r"^([a-z][a-z0-9_]{0,31})-([0-9a-z]{13})\Z")
_JOB = re.compile(r"^[0-9a-f]{32}\Z")


def process_id(name: str, wall: float, random: Random) -> str:
    """A new id for a process called `name` that starts at `wall` (Unix seconds). Raises ValueError for a bad name."""
    if not _NAME.match(name):
        raise ValueError(f"process name {name!r}: lower-case letters, digits and _ only, at most 32, a letter first")
    return f"{name}-{_base36(int(wall * 1000), 8)}{_base36(random.randrange(36**5), 5)}"


def is_process(text: str) -> bool:
    return _PROCESS.match(text) is not None


def process_name(process: str) -> str:
    """The `name` of a process id. Raises ValueError."""
    match = _PROCESS.match(process)
    if match is None:
        raise ValueError(f"not a process id: {process!r}")
    return match[1]


def replaces(newer: str, older: str) -> bool:
    """True when `newer` is a later start of the same name: proof that `older` is dead."""
    a, b = _PROCESS.match(newer), _PROCESS.match(older)
    return a is not None and b is not None and a[1] == b[1] and a[2] > b[2]


def job_id(random: Random) -> str:
    return f"{random.getrandbits(128):032x}"


def is_job(text: str) -> bool:
    return _JOB.match(text) is not None


def run_id(random: Random) -> int:
    """A non-zero unsigned 64-bit run id."""
    return random.getrandbits(64) or 1


def _base36(value: int, width: int) -> str:
    digits = []
    for _ in range(width):
        value, digit = divmod(value, 36)
        digits.append(_DIGITS[digit])
    return "".join(reversed(digits))
