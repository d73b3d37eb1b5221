"""A detached job's request as it lies in the database, and the job that another edge makes of its row."""

from __future__ import annotations

from schemas.codec import Message, decode, encode
from schemas.errors import UnreadableMessage
from schemas.job import unpack_ids
from schemas.reply import FinishReason, Logprob
from services.edge.jobs.draft import Draft
from services.edge.jobs.inherited import Inherited, Received
from services.edge.store.records import ROWS, Chunk, StoredJob


class Request(Message, frozen=True, kw_only=True):
    """As it lies in a row.

    One with an adapter has a place of its own: an edge of an older build, which knows no adapters, refuses a row without `draft`,
    and would else answer with the plain model.
    """

    draft: Draft | None = None
    adapted: Draft | None = None


def pack(draft: Draft) -> bytes:
    return encode(Request(draft=draft) if draft.adapter is None else Request(adapted=draft))


def unpack(request: bytes) -> Draft:
    """Raises `UnreadableMessage`."""
    found = decode(request, Request, ROWS)
    draft = found.draft or found.adapted
    if draft is None:
        raise UnreadableMessage("a row without a request")
    return draft


def inherit(row: StoredJob) -> Inherited:
    """From a row that was just adopted. Raises `UnreadableMessage`."""
    draft, facts = unpack(row.request), row.facts
    return Inherited(
        job=row.job,
        draft=draft,
        age=row.age,
        known_attempt=facts.attempt,
        next_attempt=facts.claimed,
        choices=[_received([chunk for chunk in row.chunks if chunk.choice == choice]) for choice in range(draft.n)],
        owned=facts.owned,
        weights=facts.weights,
        deaths=facts.deaths,
        cached_tokens=facts.cached_tokens,
        earlier_compute_s=facts.compute_s - facts.run_compute_s,
        run_compute_s=facts.run_compute_s,
    )


def _received(chunks: list[Chunk]) -> Received:
    tokens: list[int] = []
    logprobs: list[Logprob] = []
    finish: FinishReason | None = None
    for chunk in chunks:
        tokens += unpack_ids(chunk.data.tokens)
        logprobs += chunk.data.logprobs
        finish = chunk.data.finish or finish
    return Received(tokens, logprobs, finish)
