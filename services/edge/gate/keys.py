"""API keys: how they look, and what is kept of them. Pure functions.

A key is `hr-<id>-<secret>`. The id finds its row and may be shown; the secret is 256 random bits. Invariant: only a keyed digest
of the whole key is ever stored, and it is compared in constant time, so that neither a stolen table nor timing opens a door.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import b32encode
from collections.abc import Callable
from dataclasses import dataclass

PREFIX = "hr-"
DIGEST_BYTES = 32
_ID_BYTES, _SECRET_BYTES = 10, 32
_KEY = re.compile(r"hr-([a-z2-7]{16})-([a-z2-7]{52})")


@dataclass(frozen=True, slots=True)
class NewKey:
    """`text` is shown once; `id` and `digest` are kept."""

    id: str
    text: str
    digest: bytes


def new_key(secret: bytes, random_bytes: Callable[[int], bytes]) -> NewKey:
    """`secret`: the server's, at least 32 bytes; `random_bytes`: of a source fit for secrets."""
    key = _word(random_bytes(_ID_BYTES))
    text = f"{PREFIX}{key}-{_word(random_bytes(_SECRET_BYTES))}"
    return NewKey(key, text, digest(secret, text))


def key_id(text: str) -> str | None:
    """The id in a key's text; None for what is no key of ours."""
    match = _KEY.fullmatch(text)
    return match[1] if match else None


def digest(secret: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), key=secret, digest_size=DIGEST_BYTES, person=b"hr-api-key").digest()


def same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)


def _word(data: bytes) -> str:
    return b32encode(data).decode().rstrip("=").lower()
