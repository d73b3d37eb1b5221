"""A block's checksum is taken when a step has filled it, so that whatever changes it later is noticed by who reads it."""

from __future__ import annotations

from tests.engine.test_prefix_cache import BLOCK, Rig

PROMPT = list(range(20, 20 + 2 * BLOCK + 1))


async def test_a_block_has_its_checksum_from_the_step_that_filled_it() -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT, max_tokens=BLOCK)
        assert sum(map(rig.pool.has_checksum, range(rig.pool.total))) == 3, "two of the prompt, one of prompt and answer"


async def test_a_later_change_does_not_become_the_checksum() -> None:
    async with Rig() as rig:
        await rig.answer(1, PROMPT, max_tokens=2)
        block = next(filter(rig.pool.has_checksum, range(rig.pool.total)))
        before = rig.pool.checksum(block)
        rig.pool.view(block)[3] ^= 1
        assert rig.pool.checksum(block) == before
