"""Arrival traces: who comes when, with how long a prompt, sharing which prefix, and how many tokens it generates.

Two public formats, told apart by their content, not their names. Mooncake (JSON lines; `hash_ids` name prefix blocks of 512
tokens: equal ids = equal prefix) and Azure (CSV, no prefix information). No text is in either.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random

TRACE_BLOCK = 512
"""Tokens of a block that a Mooncake trace names."""
TENANTS = 50
"""Drawn by a Zipf law of exponent 1.0: no public trace says who asked."""


@dataclass(frozen=True, slots=True)
class Row:
    """`at`: seconds since the first arrival. `blocks`: identities of the prompt's full blocks."""

    at: float
    prompt: int
    output: int
    blocks: tuple[bytes, ...]
    tenant: int


def read(path: Path, *, seed: int, limit: int | None = None) -> list[Row]:
    """The rows of the trace at `path` in order of arrival. Raises ValueError when it is of neither format."""
    with path.open(encoding="utf-8", newline="") as file:
        first = file.readline()
        file.seek(0)
        parsed = sorted(_mooncake(file) if first.lstrip().startswith("{") else _azure(file), key=lambda row: row[0])
    if not parsed:
        raise ValueError(f"{path} has no rows")
    random, weights = Random(seed), list(accumulate(1 / (rank + 1) for rank in range(TENANTS)))
    tenants = random.choices(range(TENANTS), cum_weights=weights, k=len(parsed))
    start = parsed[0][0]
    rows = [Row(at - start, prompt, output, blocks, tenants[n]) for n, (at, prompt, output, blocks) in enumerate(parsed)]
    return rows[:limit]


_Parsed = tuple[float, int, int, tuple[bytes, ...]]


def _mooncake(lines: Iterable[str]) -> Iterator[_Parsed]:
    for line in filter(str.strip, lines):
        row = json.loads(line)
        prompt = max(1, int(row["input_length"]))
        ids = row.get("hash_ids") or []
        names = tuple(int(name).to_bytes(16, "little", signed=True) for name in ids[: prompt // TRACE_BLOCK])
        yield float(row["timestamp"]) / 1000, prompt, max(1, int(row["output_length"])), names


def _azure(lines: Iterable[str]) -> Iterator[_Parsed]:
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise ValueError(f"no trace that is known: neither JSON lines nor a CSV with the columns {', '.join(sorted(wanted))}")
    for row in reader:
        yield _seconds(row["TIMESTAMP"]), max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), ()


def _seconds(stamp: str) -> float:
    """A number of seconds, or a date with up to 7 digits of a second (and sometimes a zone)."""
    try:
        return float(stamp)
    except ValueError:
        date, _, fraction = stamp.partition(".")
        digits = fraction.split("+")[0].rstrip("Z") or "0"
        return datetime.fromisoformat(date.split("+")[0]).timestamp() + float(f"0.{digits}")
