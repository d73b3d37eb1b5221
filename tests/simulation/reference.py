"""What the scripted engine generates for a job that nothing disturbs: a pure function, computed without the engine."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

from schemas.job import Sampling
from schemas.reply import FinishReason

VOCAB = range(10, 300)
EOS = 0
CONTEXT = 512


def reference(prompt: Sequence[int], sampling: Sampling, choice: int = 0) -> tuple[list[int], FinishReason]:
    """Token ids of one choice, and why it ends."""
    fingerprint = 0
    for token in prompt:
        fingerprint = _link(fingerprint, token)
    tokens: list[int] = []
    while True:
        drawn = xxhash.xxh3_64_intdigest(struct.pack("<QQII", fingerprint, sampling.seed, choice, len(tokens)))
        tokens.append(VOCAB[drawn % len(VOCAB)])
        if len(tokens) > sampling.min_tokens and tokens[-1] in sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) >= sampling.max_tokens or len(prompt) + len(tokens) >= CONTEXT:
            return tokens, FinishReason.LENGTH
        fingerprint = _link(fingerprint, tokens[-1])


def _link(before: int, token: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QI", before, token))
