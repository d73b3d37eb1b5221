"""Identities of full blocks."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv.hashing import HASH_BYTES, block_hashes, cache_salt, cap_hit, chain_root, kv_compat

PARTS = {
    "weights": "w",
    "kv_dtype": "f16",
    "block_tokens": 16,
    "layout": "l",
    "engine": "torch",
    "engine_version": "1",
    "numerics": "n",
    "parallelism": "tp1",
}
ROOT = chain_root("compat", b"salt")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_only_full_blocks_have_an_identity() -> None:
    ids = list(range(33))
    assert [len(block_hashes(ids[:n], 16, ROOT)) for n in (0, 15, 16, 31, 32, 33)] == [0, 0, 1, 1, 2, 2]
    assert {len(key) for key in block_hashes(ids, 16, ROOT)} == {HASH_BYTES}


def test_identity_is_the_keyed_hash_of_parent_and_u32_le_ids() -> None:
    first = hashlib.blake2b(ROOT + struct.pack("<2I", 1, 2), digest_size=16, key=ROOT, person=b"hr-kv-block").digest()
    second = hashlib.blake2b(first + struct.pack("<2I", 3, 2**32 - 1), digest_size=16, key=ROOT, person=b"hr-kv-block").digest()
    assert block_hashes([1, 2, 3, 2**32 - 1], 2, ROOT) == [first, second]


@given(ids=tokens, block=st.integers(1, 5), cut=st.integers(0, 40))
def test_incremental_equals_at_once(ids: list[int], block: int, cut: int) -> None:
    known = block_hashes(ids[:cut], block, ROOT)
    assert block_hashes(ids, block, ROOT, known) == block_hashes(ids, block, ROOT)


@given(ids=st.lists(st.integers(0, 2**32 - 1), min_size=12, max_size=12), at=st.integers(0, 11), change=st.integers(1, 2**32 - 1))
def test_a_changed_token_changes_its_block_and_all_later_ones_only(ids: list[int], at: int, change: int) -> None:
    other = [*ids[:at], (ids[at] + change) % 2**32, *ids[at + 1 :]]
    same = [a == b for a, b in zip(block_hashes(ids, 3, ROOT), block_hashes(other, 3, ROOT), strict=True)]
    assert same == [True] * (at // 3) + [False] * (4 - at // 3)


def test_an_id_outside_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_hashes([2**32], 1, ROOT)


def test_roots_differ_by_compatibility_tenant_and_adapter() -> None:
    salts = [cache_salt(b"secret", "a"), cache_salt(b"secret", "b"), cache_salt(b"other", "a")]
    roots = {chain_root(compat, salt, adapter) for compat in ("c1", "c2") for salt in salts for adapter in (None, "", "x", "y")}
    assert len(roots) == 2 * 3 * 4
    assert chain_root("c1", salts[0], "x") == chain_root("c1", cache_salt(b"secret", "a"), "x")


def test_equal_tokens_of_two_tenants_share_nothing() -> None:
    ids = list(range(64))
    one, two = (block_hashes(ids, 16, chain_root("c", cache_salt(b"secret", tenant))) for tenant in ("a", "b"))
    assert not set(one) & set(two)


@pytest.mark.parametrize("part", PARTS)
def test_kv_compat_depends_on_each_part(part: str) -> None:
    changed = 32 if part == "block_tokens" else "other"
    assert kv_compat(**PARTS) == kv_compat(**PARTS)  # type: ignore[arg-type]
    assert kv_compat(**{**PARTS, part: changed}) != kv_compat(**PARTS)  # type: ignore[arg-type]


def test_kv_compat_does_not_confuse_neighbouring_parts() -> None:
    assert kv_compat(**{**PARTS, "engine": "a", "engine_version": "bc"}) != kv_compat(  # type: ignore[arg-type]
        **{**PARTS, "engine": "ab", "engine_version": "c"}  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("prompt", "hit"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_hit_leaves_at_least_one_token_to_compute(prompt: int, hit: int) -> None:
    assert cap_hit(prompt, 16) == hit
