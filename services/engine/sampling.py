"""Logits → tokens: penalties, biases, filters, greedy and seeded draws, log-probabilities.

Knows no engine and no torch. Invariant: token i of choice c depends on (seed, c, i, its row of logits, the ids before it) only,
so it is the same whatever the batch, and the same after a resume on another worker.

A row is changed first: the repetition penalty (on ids of prompt and answer: a positive logit divided, any other multiplied),
frequency and presence penalty (on ids of the answer: subtracted a time and once), logit_bias (added), then what may not be drawn.
Where a grammar takes nothing but what else may not be drawn, the grammar has the last word.
Then the tokens are in one order: logit descending, id ascending. min_p, top_k and top_p each keep a beginning of that order (in
this sequence; top_p counts the mass the other two left), and one uniform number picks from what is left by inverse transform.
Sources: repetition penalty, arXiv 1909.05858, over prompt and answer as in Hugging Face transformers; presence and frequency
penalty, the OpenAI API reference; nucleus sampling, arXiv 1904.09751; min-p, arXiv 2407.01082; counter-based generators, Salmon
et al., SC 2011.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InvalidRequest
from schemas.job import Sampling
from services.engine.constraint import Constraint, ConstraintBroken
from services.engine.history import History
from services.engine.logprobs import Row, in_order, logprob_of
from services.engine.runner import Failed, Sampled

_COUNTER = struct.Struct("<QQQ")
_NOTHING = -745.0  # e**-745 is the smallest positive float64: what lies lower has no mass
_FLOORS = (-8.0, -24.0, _NOTHING)  # how far below the best token to look, in nats, until enough mass is found


@dataclass(frozen=True, slots=True)
class Draw:
    """The next token of one choice. `index`: its place among the choice's generated tokens; `banned`: ids it may not be.

    `history`: the ids before it, when there are penalties; `constraint`: the choice's place in its grammar, which the draw moves.
    """

    sampling: Sampling
    choice: int
    index: int
    banned: tuple[int, ...] = ()
    history: History | None = None
    constraint: Constraint | None = None


def sample(logits: NDArray[np.float32], draws: Sequence[Draw]) -> list[Sampled | Failed]:
    """One outcome for each row of `logits` [rows, vocab]. A row with NaN or an infinity, a broken grammar, or nothing that may be
    drawn fails alone."""
    finite = np.isfinite(logits.min(axis=1)) & np.isfinite(logits.max(axis=1))
    rows = zip(logits, draws, finite, strict=True)
    return [_draw(row, draw) if good else Failed("logits are not finite") for row, draw, good in rows]


def uniform(seed: int, choice: int, index: int) -> float:
    """The one random number in [0, 1) of a token, 53 bits of BLAKE2b over the counter (seed, choice, index)."""
    digest = hashlib.blake2b(_COUNTER.pack(seed, choice, index), digest_size=8, person=b"hr-sampling").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(row: NDArray[np.float32], draw: Draw) -> Sampled | Failed:
    if draw.constraint is None and len(draw.banned) >= len(row):
        return Failed("every token is banned", InvalidRequest.code)
    try:
        shaped = _shaped(row, draw)
    except ConstraintBroken as broken:
        return Failed(str(broken), InvalidRequest.code)
    if draw.sampling.temperature == 0.0:
        token = int(shaped.argmax())
    else:
        token = _pick(shaped, draw.sampling, uniform(draw.sampling.seed, draw.choice, draw.index))
    complete = draw.constraint is not None and draw.constraint.take(token)
    return Sampled(token, logprob_of(row, token, draw.sampling.logprobs), complete)


def _shaped(row: NDArray[np.float32], draw: Draw) -> NDArray[np.float32]:
    """The row to draw from; `row` itself is left alone. What may not be drawn comes last, so that nothing brings it back."""
    bias = draw.sampling.logit_bias
    if draw.history is None and not bias and not draw.banned and draw.constraint is None:
        return row
    shaped = row.copy()
    if draw.history is not None:
        _penalise(shaped, draw.history, draw.sampling)
    if bias:
        shaped[list(bias)] += np.array(list(bias.values()), np.float32)
    if draw.constraint is not None:
        shaped[~_drawable(draw.constraint, draw.banned, len(shaped))] = -np.inf
    elif draw.banned:
        shaped[list(draw.banned)] = -np.inf
    return shaped


def _drawable(constraint: Constraint, banned: tuple[int, ...], vocab: int) -> NDArray[np.bool_]:
    allowed = constraint.allowed(vocab)
    wanted = allowed.copy()
    wanted[list(banned)] = False
    return wanted if wanted.any() else allowed


def _penalise(row: NDArray[np.float32], history: History, sampling: Sampling) -> None:
    ids, counts = history.ids, history.counts
    values = row[ids]
    factor = np.float32(sampling.repetition_penalty)
    values = np.where(values > 0, values / factor, values * factor)
    values -= np.float32(sampling.frequency_penalty) * counts
    values -= np.float32(sampling.presence_penalty) * (counts > 0)
    row[ids] = values


def _pick(row: NDArray[np.float32], sampling: Sampling, point: float) -> int:
    """The token at `point` of the kept distribution."""
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the best token to -inf, which is its limit
        nats = (row.astype(np.float64) - float(row.max())) / sampling.temperature
    if sampling.min_p > 0.0 or sampling.top_k > 0:
        ids = _limited(nats, sampling)
        mass = np.cumsum(np.exp(nats[ids]))
        total = float(mass[-1])
    else:
        total = float(np.exp(nats).sum())
        ids, mass = _best(nats, total * (sampling.top_p if sampling.top_p < 1.0 else point))
    kept = len(ids)
    if sampling.top_p < 1.0:
        kept = min(kept, int(np.searchsorted(mass, sampling.top_p * total)) + 1)
        total = float(mass[kept - 1])
    return int(ids[min(kept - 1, int(np.searchsorted(mass, point * total, side="right")))])


def _limited(nats: Row, sampling: Sampling) -> NDArray[np.int64]:
    """What min_p and top_k leave."""
    floor = max(_NOTHING, math.log(sampling.min_p)) if sampling.min_p > 0.0 else _NOTHING
    k = min(sampling.top_k, len(nats)) or len(nats)
    if k < len(nats):
        floor = max(floor, float(np.partition(nats, -k)[-k]))
    return in_order(nats, floor)[:k]


def _best(nats: Row, needed: float) -> tuple[NDArray[np.int64], Row]:
    """The best tokens, at least so many that their mass exceeds `needed`, and their cumulative mass.

    Sorting the few within reach instead of the whole vocabulary changes no bit of what is returned up to `needed`.
    """
    for floor in _FLOORS:
        ids = in_order(nats, floor)
        mass = np.cumsum(np.exp(nats[ids]))
        if mass[-1] > needed:
            break
    return ids, mass
