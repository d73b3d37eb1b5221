"""What the whole-stack bench asks of a server, the same of each: a row is one run of the load generator, or two side by side.

Every request of a run has a prompt of its own: a row reads its bodies on from where its last turn with this server ended, and all
servers get the same ones. Rates are of the whole run, first tokens included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.stack import load_result, run_load, start_load

SHORT, LONG, ARRIVING, LONGEST = 20, 430, 1500, 7600
"""Words of a prompt; with the template about 55, 470, 1540 and 7700 tokens."""


@dataclass(frozen=True)
class Closed:
    """`streams` requests open at a time, `tokens` each. `requests` in all; of a run that is cut off, more than it can need."""

    name: str
    streams: int
    requests: int
    tokens: int
    words: int


ONE = Closed("decode, 1 stream", 1, 2, 128, SHORT)
EIGHT = Closed("decode, 8 streams", 8, 16, 64, SHORT)
SIXTEEN = Closed("decode, 16 streams", 16, 32, 64, SHORT)
FIRST = Closed("456-token prompt", 1, 4, 1, LONG)
EIGHT_LONG = Closed("8 streams, 456-token prompts", 8, 16, 64, LONG)
TUNING = (replace(ONE, requests=1), EIGHT, replace(EIGHT_LONG, requests=8))
RUNNING = Closed("8 running streams", 8, 48, 256, SHORT)
ARRIVALS = Closed("arriving prompts", 1, 48, 1, ARRIVING)
LONGEST_ARRIVALS = Closed("arriving prompts of 8k tokens", 1, 24, 1, LONGEST)
ALL = (ONE, EIGHT, SIXTEEN, FIRST, EIGHT_LONG, RUNNING, ARRIVALS, LONGEST_ARRIVALS)
Figures = dict[str, float]


class Workloads:
    """The bodies of all rows in `folder`, for `model`, and the generator `program`."""

    def __init__(self, folder: Path, program: Path, model: str, turns: int) -> None:
        self._folder = folder
        self._program = program
        for seed, row in enumerate(ALL):
            count = row.requests * turns
            write_bodies(self._path(row), model=model, max_tokens=row.tokens, words=row.words, count=count, seed=seed)

    def tokens_s(self, port: int, row: Closed, turn: int) -> float:
        return float(self._closed(port, row, turn)["tok_s"])

    def one_turn(self, port: int, turn: int, window: float) -> Figures:
        """The figure of every target, by its name in `targets.py`."""
        figures = {row.name: self.tokens_s(port, row, turn) for row in (ONE, EIGHT, SIXTEEN)}
        figures["time to first token, 456-token prompt"] = float(self._closed(port, FIRST, turn)["ttft_ms"]["p50"])
        figures[EIGHT_LONG.name] = self.tokens_s(port, EIGHT_LONG, turn)
        running, arriving = self.beside(port, ARRIVALS, window, turn)
        figures["arrivals: inter-token p99"] = float(running["itl_ms"]["p99"])
        figures["arrivals: their time to first token p50"] = float(arriving["ttft_ms"]["p50"])
        generated = running["tokens"] + arriving["tokens"]
        figures["arrivals: total tokens/s"] = (generated + running["prompt_tokens"] + arriving["prompt_tokens"]) / window
        figures["arrivals: generated tokens/s"] = generated / window
        return figures

    def beside(self, port: int, arrivals: Closed, window: float, turn: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Eight streams for `window` seconds, and as long one prompt of `arrivals` after the other: what came of each.

        Where nothing came, times are as long as the window, which is their least.
        """
        loads = []
        for row in (RUNNING, arrivals):
            options = ("-c", str(row.streams), "-d", str(window), "-o", str(row.requests * turn))
            loads.append(start_load(self._program, port, self._path(row), *options))
        running, arriving = (load_result(load) for load in loads)
        running["itl_ms"]["p99"] = running["itl_ms"]["p99"] or 1e3 * window
        arriving["ttft_ms"]["p50"] = arriving["ttft_ms"]["p50"] or 1e3 * window
        return running, arriving

    def _closed(self, port: int, row: Closed, turn: int) -> dict[str, Any]:
        offset = row.requests * turn
        return run_load(self._program, port, self._path(row), streams=row.streams, requests=row.requests, offset=offset)

    def _path(self, row: Closed) -> Path:
        return self._folder / f"{row.words}-{row.tokens}-{row.streams}.jsonl"
