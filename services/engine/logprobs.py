"""Log-probabilities of tokens under a row of logits, and the order of tokens that goes with them.

Knows no engine and no torch. The model's own distribution: before temperature, penalties, biases and filters, as OpenAI's API
reports it. Invariant: tokens are in one order everywhere, logit descending, id ascending.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.reply import Logprob
from services.engine.runner import Failed

Row = NDArray[np.float64]


def in_order(nats: Row, floor: float) -> NDArray[np.int64]:
    """The ids of the values of at least `floor`, best first, equal ones by id."""
    ids = np.flatnonzero(nats >= floor)
    return ids[np.argsort(-nats[ids], kind="stable")]


def logprob_of(row: NDArray[np.float32], token: int, alternatives: int | None) -> Logprob | None:
    """Of `token` and of the `alternatives` likeliest; None when that is None. `row` [vocab], finite."""
    if alternatives is None:
        return None
    nats = _nats(row)
    return Logprob(token=token, logprob=float(nats[token]), top=_top(nats, alternatives))


def score(rows: NDArray[np.float32], tokens: Sequence[int], alternatives: int) -> tuple[Logprob, ...] | Failed:
    """How likely each of `tokens` is under its row of `rows` [tokens, vocab], with its rank. One row at a time in float64."""
    scored = []
    for row, token in zip(rows, tokens, strict=True):
        if not np.isfinite(row).all():
            return Failed("logits are not finite")
        nats = _nats(row)
        rank = 1 + int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
        scored.append(Logprob(token=token, logprob=float(nats[token]), top=_top(nats, alternatives), rank=rank))
    return tuple(scored)


def _nats(row: NDArray[np.float32]) -> Row:
    nats = row.astype(np.float64) - float(row.max())
    nats -= math.log(float(np.exp(nats).sum()))
    return nats


def _top(nats: Row, alternatives: int) -> tuple[tuple[int, float], ...]:
    if alternatives == 0:
        return ()
    most = min(alternatives, len(nats))
    least = np.partition(nats, -most)[-most]
    return tuple((int(best), float(nats[best])) for best in in_order(nats, float(least))[:most])
