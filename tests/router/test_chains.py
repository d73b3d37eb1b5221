"""What is remembered of hashed prompts is what hashing them anew gives, and bounded."""

from __future__ import annotations

from random import Random

import pytest

from schemas.job import pack_ids
from services.kv.hashing import block_hashes, chain_root
from services.router.chains import SEGMENT, Chains

BLOCK = 4
ROOT = chain_root("kv", b"salt")


def walked(chains: Chains, ids: list[int], root: bytes = ROOT) -> list[bytes]:
    return [name for names in chains.names(pack_ids(ids), BLOCK, root) for name in names]


def pieces(chains: Chains, ids: list[int], root: bytes = ROOT) -> list[int]:
    """How many blocks came at once."""
    return [len(names) for names in chains.names(pack_ids(ids), BLOCK, root)]


@pytest.mark.parametrize("most", [2, 4, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_names_are_those_of_hashing_anew(most: int, seed: int) -> None:
    random, chains, seen = Random(seed), Chains(most), [[7] * 1000]
    for _ in range(60):
        shared = random.choice(seen)
        ids = shared[: random.randrange(len(shared) + 1)] + [random.randrange(2**32) for _ in range(random.randrange(300))]
        root = chain_root("kv", random.choice([b"salt", b"another tenant"]))
        names = chains.names(pack_ids(ids), BLOCK, root)
        if random.random() < 0.3:  # somebody who stops in between
            next(names, None)
        assert walked(chains, ids, root) == block_hashes(ids, BLOCK, root)
        seen.append(ids)


def test_a_beginning_that_was_seen_is_not_hashed_again() -> None:
    chains, trunk = Chains(), list(range(3 * SEGMENT * BLOCK + 5))
    assert pieces(chains, trunk) == [1] * (3 * SEGMENT + 1)
    assert pieces(chains, [*trunk, 1, 2, 3]) == [SEGMENT] * 3 + [1] * 2
    assert pieces(chains, [*trunk[:-10], 1, 2, 3]) == [SEGMENT] * 2 + [1] * (SEGMENT - 1)
    assert pieces(chains, trunk, chain_root("kv", b"another tenant")) == [1] * (3 * SEGMENT + 1), "another tenant's"


def test_who_stops_asking_has_no_more_hashed() -> None:
    names = Chains().names(pack_ids(range(1000)), BLOCK, ROOT)
    assert len(next(names)) == 1


def test_what_was_asked_for_last_is_remembered_and_no_more() -> None:
    chains, often = Chains(most=8), list(range(SEGMENT * BLOCK))
    for number in range(100):
        walked(chains, [number] * (SEGMENT * BLOCK))
        assert pieces(chains, often) == ([1] * SEGMENT if number == 0 else [SEGMENT])
    assert len(chains) <= 8
    assert pieces(chains, [0] * (SEGMENT * BLOCK)) == [1] * SEGMENT, "forgotten"
