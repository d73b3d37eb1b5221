"""What one key, or one tenant, may use in a minute, a day, a month and at once, and how large a request may be. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, forbid_unknown_fields=True):
    """None = no limit. Tokens are those of prompt and answer together; `prompt_tokens` and `output_tokens` are of one request.

    `concurrent`: requests that run at once. Days and months are UTC's.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent: Count | None = None
    tokens_per_day: Count | None = None
    tokens_per_month: Count | None = None
    prompt_tokens: Count | None = None
    output_tokens: Count | None = None


NONE = Limits()


def longest_answer(limits: Limits, prompt_tokens: int) -> int | None:
    """That can ever be given to such a prompt, in tokens; None = any."""
    whole = (limits.tokens_per_minute, limits.tokens_per_day, limits.tokens_per_month)
    rooms = [most - prompt_tokens for most in whole if most is not None]
    return min(rooms if limits.output_tokens is None else [*rooms, limits.output_tokens], default=None)
