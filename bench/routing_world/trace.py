"""Arrival traces: who comes when, with how long a prompt, sharing which prefix, and how many tokens it generates.

Two public formats, told apart by their content, not their names. Mooncake (JSON lines; `hash_ids` name prefix blocks of 512
tokens: equal ids = equal prefix) and Azure (CSV, no prefix information). No text is in either.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, chain
from pathlib import Path
from random import Random
from typing import Any, TextIO

TRACE_BLOCK = 512
"""Tokens of a block that a Mooncake trace names."""
TENANTS = 50
"""Drawn by a Zipf law of exponent 1.0: no public trace says who asked."""
MOST_TOKENS = 10**9
LATEST_S = 1e12
"""Before or after 0: what is farther is a mistake."""
GZIP = b"\x1f\x8b"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Row:
    """`at`: seconds since the first arrival. `blocks`: identities of the prompt's full blocks."""

    at: float
    prompt: int
    output: int
    blocks: tuple[bytes, ...]
    tenant: int


def read(path: Path, *, seed: int, limit: int | None = None) -> list[Row]:
    """The rows of the trace at `path`, compressed by gzip or not, in order of arrival.

    A prompt or an answer of no tokens counts as one of one. Raises OSError, and ValueError that names line and field.
    """
    try:
        with _open(path) as file:
            parsed = sorted(_parse(file), key=lambda row: row[0])
    except UnicodeDecodeError:
        raise ValueError("is no text in UTF-8") from None
    except (EOFError, zlib.error):
        raise ValueError("is compressed and damaged, or only a part of a file") from None
    if not parsed:
        raise ValueError("has no rows")
    random, weights = Random(seed), list(accumulate(1 / (rank + 1) for rank in range(TENANTS)))
    tenants = random.choices(range(TENANTS), cum_weights=weights, k=len(parsed))
    start = parsed[0][0]
    rows = [Row(at - start, prompt, output, blocks, tenants[n]) for n, (at, prompt, output, blocks) in enumerate(parsed)]
    return rows[:limit]


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        compressed = file.read(len(GZIP)) == GZIP
    opened = gzip.open if compressed else open
    return opened(path, "rt", encoding="utf-8-sig", newline="")


_Parsed = tuple[float, int, int, tuple[bytes, ...]]


def _parse(file: TextIO) -> Iterator[_Parsed]:
    lines: Iterator[tuple[int, str]] = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    is_json = first[1].lstrip().startswith("{")
    parse = _mooncake if is_json else _azure(first[1])
    for number, line in chain((first,), lines) if is_json else lines:
        try:
            yield parse(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _mooncake(line: str) -> _Parsed:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError("is no JSON object")
    prompt = _tokens(row, "input_length")
    ids = row.get("hash_ids") or []
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids: {reprlib.repr(ids)} is no list")
    names = tuple(_name(each) for each in ids[: prompt // TRACE_BLOCK])
    return _moment(row, "timestamp", 1000), prompt, _tokens(row, "output_length"), names


def _azure(header: str) -> Callable[[str], _Parsed]:
    names = [name.strip() for name in _cells(header)]
    missing = [column for column in COLUMNS if column not in names]
    if len(missing) == len(COLUMNS):
        raise ValueError(f"is no trace that is known: neither JSON lines nor a CSV with the columns {', '.join(COLUMNS)}")
    if missing:
        raise ValueError(f"the column {missing[0]} is missing")

    def parse(line: str) -> _Parsed:
        row = dict(zip(names, _cells(line), strict=False))
        at, prompt, output = COLUMNS
        return _moment(row, at, 1), _tokens(row, prompt), _tokens(row, output), ()

    return parse


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader((line,)))
    except csv.Error as error:
        raise ValueError(str(error)) from None


def _tokens(row: Mapping[str, Any], field: str) -> int:
    value = _value(row, field)
    count = _number(value)
    if not 0 <= count <= MOST_TOKENS or count % 1:
        raise ValueError(f"{field}: {reprlib.repr(value)} is no count of tokens")
    return max(1, int(count))


def _moment(row: Mapping[str, Any], field: str, a_second: int) -> float:
    """In seconds: a number, of which `a_second` are a second, or a date. One without a zone is in UTC."""
    value = _value(row, field)
    seconds = _number(value) / a_second
    if math.isnan(seconds) and isinstance(value, str):
        seconds = _date(value)
    if not abs(seconds) <= LATEST_S:
        raise ValueError(f"{field}: {reprlib.repr(value)} is no time")
    return seconds


def _value(row: Mapping[str, Any], field: str) -> object:
    value = row.get(field)
    if value is None or value == "":
        raise ValueError(f"{field} is missing")
    return value


def _number(value: object) -> float:
    """NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _date(value: str) -> float:
    """Unix seconds, NaN for what is no date."""
    try:
        when = datetime.fromisoformat(value.strip())
    except ValueError:
        return math.nan
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _name(each: object) -> bytes:
    if not isinstance(each, int) or isinstance(each, bool) or each.bit_length() > 126:
        raise ValueError(f"hash_ids: {reprlib.repr(each)} is no name of a block")
    return each.to_bytes(16, "little", signed=True)
