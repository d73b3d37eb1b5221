"""What an operator asks of `hr.admin.router.<id>.explain`: a job that nobody submitted. JSON, so that a person can type it."""

from __future__ import annotations

from random import Random
from typing import Annotated

import msgspec

from schemas.codec import decode_json
from schemas.errors import UnreadableMessage
from schemas.identity import job_id, process_id
from schemas.job import LANES, Deadlines, Job, Sampling, Tier, pack_ids

MOST_TOKENS = 2**20
Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokens`: the prompt's ids, or only how many they are. `salt`: the tenant's, in hex. Seconds as in a job's deadlines."""

    model: str
    tokens: Size | Annotated[list[Token], msgspec.Meta(min_length=1, max_length=MOST_TOKENS)]
    tier: Tier = Tier.PAID
    lane: Annotated[int, msgspec.Meta(ge=0, lt=LANES)] = 0
    salt: str = ""
    queue_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    first_token_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0


def read_question(data: bytes, wall: float, random: Random) -> Job:
    """As a job that begins at `wall`, Unix seconds; of a prompt whose ids are not given nothing is cached anywhere.

    Raises `UnreadableMessage`.
    """
    asked = decode_json(data, Question)
    try:
        return _job(asked, wall, random)
    except ValueError as error:
        raise UnreadableMessage(f"no question that can be explained: {error}") from None


def _job(asked: Question, wall: float, random: Random) -> Job:
    prompt = pack_ids(asked.tokens) if isinstance(asked.tokens, list) else random.randbytes(4 * asked.tokens)
    edge = process_id("explain", wall, random)
    return Job(
        job=job_id(random),
        attempt=1,
        model=asked.model,
        prompt=prompt,
        sampling=Sampling(seed=0, max_tokens=1),
        deadlines=Deadlines(stamp=wall, total=asked.first_token_s, queue=asked.queue_s, first_token=asked.first_token_s),
        reply_to=edge,
        edge=edge,
        tier=asked.tier,
        lane=asked.lane,
        salt=bytes.fromhex(asked.salt),
    )
