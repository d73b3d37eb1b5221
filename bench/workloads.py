"""What the whole-stack bench asks of a server, the same of each: a row is one run of the load generator, or two side by side.

Every request of a run has a prompt of its own: a row reads its bodies on from where its last turn with this server ended, and all
servers get the same ones. Rates are of the whole run, first tokens included. Where prompts arrive beside running streams the work
is fixed, not the time: a prompt that is half done when a clock ends would count as nothing, and be a quarter of the figure.
"""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.bodies import write_bodies
from bench.stack import load_result, run_load, start_load

SHORT, LONG, ARRIVING, LONGEST = 20, 430, 1500, 7600
"""Words of a prompt; with the template about 55, 470, 1540 and 7700 tokens."""


@dataclass(frozen=True)
class Closed:
    """`streams` requests open at a time, `tokens` each. `requests` in all; more than enough where another run ends it."""

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
ARRIVALS = Closed("arriving prompts", 1, 5, 1, ARRIVING)
LONGEST_ARRIVALS = Closed("arriving prompts of 8k tokens", 1, 2, 1, LONGEST)
_LONGEST_RUN_S = 590
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

    def one_turn(self, port: int, turn: int) -> Figures:
        """The figure of every target, by its name in `targets.py`."""
        figures = {row.name: self.tokens_s(port, row, turn) for row in (ONE, EIGHT, SIXTEEN)}
        figures["time to first token, 456-token prompt"] = float(self._closed(port, FIRST, turn)["ttft_ms"]["p50"])
        figures[EIGHT_LONG.name] = self.tokens_s(port, EIGHT_LONG, turn)
        running, arriving = self.beside(port, ARRIVALS, turn)
        figures["arrivals: inter-token p99"] = float(running["itl_ms"]["p99"])
        figures["arrivals: their time to first token p50"] = float(arriving["ttft_ms"]["p50"])
        generated = running["tok_s"] + arriving["tok_s"]
        figures["arrivals: total tokens/s"] = generated + arriving["prompt_tokens"] / arriving["secs"]
        figures["arrivals: generated tokens/s"] = generated
        return figures

    def beside(self, port: int, arrivals: Closed, turn: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Eight streams while one prompt of `arrivals` after the other is sent, until the last has its token: what came of each.

        Where no second token came, the time between two is as long as all of it, which is its least.
        """
        running = self._start(port, RUNNING, turn, "-d", str(_LONGEST_RUN_S))
        try:
            arriving = load_result(self._start(port, arrivals, turn, "-n", str(arrivals.requests)))
        finally:
            running.send_signal(signal.SIGTERM)
            stayed = load_result(running)
        stayed["itl_ms"]["p99"] = stayed["itl_ms"]["p99"] or 1e3 * stayed["secs"]
        return stayed, arriving

    def _start(self, port: int, row: Closed, turn: int, *ends: str) -> subprocess.Popen[str]:
        options = ("-c", str(row.streams), "-o", str(row.requests * turn), "-t", str(_LONGEST_RUN_S), *ends)
        return start_load(self._program, port, self._path(row), *options)

    def _closed(self, port: int, row: Closed, turn: int) -> dict[str, Any]:
        offset = row.requests * turn
        return run_load(self._program, port, self._path(row), streams=row.streams, requests=row.requests, offset=offset)

    def _path(self, row: Closed) -> Path:
        return self._folder / f"{row.words}-{row.tokens}-{row.streams}.jsonl"
