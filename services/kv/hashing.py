"""Identity of full KV blocks, and what makes two workers' blocks interchangeable.

Owns: the bytes that are hashed, in which order. Must not know: the pool, the cache. Invariant: two blocks share an identity only
if weights, engine, layout, tenant, adapter and every token up to their end are the same. Without the tenant's salt, which only
holders of the server secret can make, an identity can be neither computed nor tested.

Every hash is keyed BLAKE2b (RFC 7693), 128 bits.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence

from schemas.job import pack_ids
from schemas.transfer import TRANSFER_SCHEMA

HASH_BYTES = 16


def kv_compat(
    *,
    weights: str,
    kv_dtype: str,
    block_tokens: int,
    layout: str,
    engine: str,
    engine_version: str,
    numerics: str,
    parallelism: str,
) -> str:
    """Hex name of everything that must be equal before one worker may read another's KV blocks, with the transfer's version.

    `layout`: order of layers, K/V, heads, tokens in a block; `numerics`: compute dtype and kernels, as far as they change bits.
    """
    parts = (weights, kv_dtype, str(block_tokens), layout, engine, engine_version, numerics, parallelism, str(TRANSFER_SCHEMA))
    return _digest(b"", b"hr-kv-compat", *(part.encode() for part in parts)).hex()


def cache_salt(server_secret: bytes, tenant: str) -> bytes:
    """A tenant's 32-byte salt: HMAC-SHA256(server secret, tenant). Tenants neither share nor observe each other's cache."""
    return hmac.digest(server_secret, tenant.encode(), "sha256")


def chain_root(kv_compat: str, salt: bytes, adapter: str | None = None) -> bytes:
    """The parent of a prompt's first block. `salt` is `Job.salt`, at most 64 bytes; no adapter differs from one named ""."""
    named = b"" if adapter is None else b"=" + adapter.encode()
    return _digest(salt, b"hr-kv-root", kv_compat.encode(), named)


def block_hashes(ids: Sequence[int], block_tokens: int, root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Identities of the full blocks of `ids`, first to last; a part of a block at the end has none.

    `known` are the first identities when they are computed already, so a growing sequence costs only its new blocks.
    Raises OverflowError for an id outside u32.
    """
    hashes = list(known)
    rest = pack_ids(ids[len(hashes) * block_tokens :])
    hashes += chain(rest, block_tokens, root, hashes[-1] if hashes else root)
    return hashes


def chain(packed: bytes, block_tokens: int, root: bytes, parent: bytes | None = None, start: int = 0) -> Iterator[bytes]:
    """The same of ids that are u32 little-endian bytes already, from byte `start` on, where the block before is `parent`; each
    is computed when it is asked for."""
    keyed = hashlib.blake2b(digest_size=HASH_BYTES, key=root, person=b"hr-kv-block")
    size, last = 4 * block_tokens, root if parent is None else parent
    for at in range(start, len(packed) - size + 1, size):
        block = keyed.copy()
        block.update(last + packed[at : at + size])
        last = block.digest()
        yield last


def cap_hit(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks a prompt may take from a cache: at least its last token is computed, for its logits."""
    return max(0, prompt_tokens - 1) // block_tokens


def _digest(key: bytes, purpose: bytes, *parts: bytes) -> bytes:
    """Length-prefixed, so that no two lists of parts are the same bytes."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, key=key, person=purpose)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
