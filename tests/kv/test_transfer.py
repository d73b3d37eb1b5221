"""The transfer protocol, the same for every carrier and event loop: offer → fetch → release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from schemas.transfer import RefusalReason
from services.kv.holders import HandoffHolder, RunHolder
from services.kv.pool import LedgerError
from services.kv.transfer.interface import ConnectionLost, CorruptBlock, FetchDenied, FetchTimeout, Outcome, TransferError
from tests.kv.rig import COMPAT, Rig, needs_nixl, rig
from tests.waiting import PATIENCE_S, until

H1 = HandoffHolder(1)


@pytest.fixture(params=["memory", "tcp", "shm", pytest.param("nixl", marks=needs_nixl)])
async def both(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig(request.param) as made:
        yield made


async def test_blocks_arrive_whole_and_are_released(both: Rig) -> None:
    ticket, blocks = both.offer(1, 9)
    slots = [block.slot for block in blocks]
    assert slots != sorted(slots), "the rig scatters slots"
    expected, into = both.contents(blocks), both.room(1, 9)
    async with await both.client.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S) as fetched:
        assert both.prefill.held == 9, "lent until released"
        assert await fetched.release()
    assert [bytes(view) for view in into] == expected
    assert both.ended == [(H1, Outcome.RELEASED)]
    both.check_baseline()


async def test_only_the_blocks_asked_for_are_copied_and_the_whole_offer_is_released(both: Rig) -> None:
    ticket, blocks = both.offer(1, 6)
    wanted = [blocks[4], blocks[1]]
    into = both.room(1, 3)
    fetched = await both.client.fetch(ticket, wanted, into[:2], kv_compat=COMPAT, timeout=PATIENCE_S)
    assert await fetched.release()
    assert [bytes(view) for view in into[:2]] == both.contents(wanted)
    assert not any(into[2])
    both.check_baseline()


async def test_nothing_to_copy_is_still_released(both: Rig) -> None:
    ticket, _ = both.offer(1, 2)
    fetched = await both.client.fetch(ticket, [], [], kv_compat=COMPAT, timeout=PATIENCE_S)
    assert await fetched.release()
    both.check_baseline()


async def test_release_is_answered_once(both: Rig) -> None:
    ticket, blocks = both.offer(1, 1)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
    assert await fetched.release()
    assert not await fetched.release()
    assert both.ended == [(H1, Outcome.RELEASED)]


async def test_a_bit_that_flipped_after_the_checksum_is_found(both: Rig) -> None:
    ticket, blocks = both.offer(1, 3)
    both.prefill.checksum(blocks[2].slot)
    both.prefill.view(blocks[2].slot)[1000] ^= 1
    with pytest.raises(CorruptBlock):
        await both.client.fetch(ticket, blocks, both.room(1, 3), kv_compat=COMPAT, timeout=PATIENCE_S)
    await until(lambda: both.ended == [(H1, Outcome.LOST)])
    both.check_baseline()


async def _refused(both: Rig, reason: RefusalReason, ticket, blocks, compat: str = COMPAT) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FetchDenied) as refused:
        await both.client.fetch(ticket, blocks, both.room(99, len(blocks)), kv_compat=compat, timeout=PATIENCE_S)
    both.decode.release(RunHolder(99))
    assert refused.value.reason is reason
    assert both.server.counts[reason] == 1


async def test_a_ticket_in_use_is_refused_and_its_user_is_not_disturbed(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    await _refused(both, RefusalReason.USED, ticket, blocks)
    assert await fetched.release()


async def test_a_ticket_that_was_used_is_refused(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    await (await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)).release()
    await _refused(both, RefusalReason.USED, ticket, blocks)
    assert both.ended == [(H1, Outcome.RELEASED)]


@pytest.mark.parametrize("spoil", [lambda t: t[:-1] + bytes([t[-1] ^ 1]), lambda t: bytes(24), lambda t: t[:8], lambda t: b""])
async def test_a_guessed_ticket_is_unknown_and_spoils_nothing(both: Rig, spoil) -> None:  # type: ignore[no-untyped-def]
    ticket, blocks = both.offer(1, 2)
    guess = msgspec.structs.replace(ticket, token=spoil(ticket.token))
    await _refused(both, RefusalReason.UNKNOWN, guess, blocks)
    assert await (await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)).release()


@pytest.mark.parametrize("compat", ["other", "kv-compät"])
async def test_incompatible_kv_is_refused_and_ends_the_offer(both: Rig, compat: str) -> None:
    ticket, blocks = both.offer(1, 2)
    await _refused(both, RefusalReason.INCOMPATIBLE, ticket, blocks, compat)
    assert both.ended == [(H1, Outcome.LOST)]
    both.check_baseline()


@pytest.mark.parametrize("wrong", [{"slot": 31}, {"generation": 77}, {"slot": -1}, {"slot": 1 << 40}])
async def test_blocks_that_are_not_in_the_offer_are_refused(both: Rig, wrong: dict[str, int]) -> None:
    both.prefill.allocate(RunHolder(5), 2)
    ticket, blocks = both.offer(1, 2)
    await _refused(both, RefusalReason.BLOCKS, ticket, [blocks[0], msgspec.structs.replace(blocks[1], **wrong)])
    assert both.ended == [(H1, Outcome.LOST)]


async def test_asking_for_a_block_over_and_over_is_refused(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    await _refused(both, RefusalReason.BLOCKS, ticket, [blocks[0]] * 3)


async def test_blocks_of_another_size_are_not_accepted(both: Rig) -> None:
    ticket, blocks = both.offer(1, 1)
    with pytest.raises(CorruptBlock, match="4096 bytes there and 100 here"):
        await both.client.fetch(ticket, blocks, [memoryview(bytearray(100))], kv_compat=COMPAT, timeout=PATIENCE_S)
    await until(lambda: both.ended == [(H1, Outcome.LOST)])


async def test_a_reader_that_froze_past_its_lease_is_answered_expired(both: Rig) -> None:
    ticket, blocks = both.offer(1, 4)
    expected, into = both.contents(blocks), both.room(1, 4)
    fetched = await both.frozen.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S)
    both.clock.advance(2.1)
    await until(lambda: both.ended == [(H1, Outcome.EXPIRED)])
    both.check_baseline()
    for block in both.prefill.allocate(RunHolder(2), both.prefill.total):
        both.prefill.view(block)[:] = b"\xee" * both.prefill.block_bytes
    assert not await fetched.release(), "reused blocks are never confirmed"
    assert [bytes(view) for view in into] == expected, "nothing foreign was written"
    assert len(both.prefill.blocks(RunHolder(2))) == both.prefill.total, "the new owner lost nothing"


async def test_expiry_that_nobody_noticed_yet_is_expired_too(both: Rig) -> None:
    """The serving process froze: its clock moved, its sweep did not run, the release is the first thing it reads."""
    ticket, blocks = both.offer(1, 2)
    fetched = await both.frozen.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    both.clock.advance(2.1)
    assert both.prefill.expire(both.clock.now) == [H1]
    assert not await fetched.release()
    assert both.ended == [(H1, Outcome.EXPIRED)]


async def test_a_block_reused_behind_the_offers_back_is_not_confirmed(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    both.prefill.give_back(H1, [blocks[0].slot])
    both.prefill.allocate(RunHolder(2), both.prefill.available)
    assert not await fetched.release()
    assert both.prefill.generation(blocks[0].slot) == blocks[0].generation + 1


async def test_a_reader_keeps_its_lease_as_long_as_it_lives(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    for _ in range(6):
        both.clock.advance(1.9)
        await until(lambda: both.prefill.alive(H1, both.clock.now + 1.95))
    assert await fetched.release()


async def test_an_offer_is_kept_by_the_server_until_it_is_presented_but_not_for_ever(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    for _ in range(2):
        both.clock.advance(1.9)
        await until(lambda: both.prefill.alive(H1, both.clock.now + 1.15))
    both.clock.advance(1.1)
    assert both.prefill.alive(H1, both.clock.now), "4.9 s: still fetchable"
    both.clock.advance(0.1)
    await until(lambda: both.ended == [(H1, Outcome.EXPIRED)])
    both.check_baseline()
    await _refused(both, RefusalReason.EXPIRED, ticket, blocks)


async def test_a_ticket_that_ran_out_unnoticed_is_refused(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    both.clock.advance(5.1)
    await _refused(both, RefusalReason.EXPIRED, ticket, blocks)
    assert both.ended == [(H1, Outcome.EXPIRED)]


async def test_a_revoked_ticket_is_refused_and_its_blocks_are_free(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    assert both.server.revoke(H1)
    assert not both.server.revoke(H1)
    both.check_baseline()
    await _refused(both, RefusalReason.UNKNOWN, ticket, blocks)
    assert both.ended == [], "the owner revoked it and needs no report"


async def test_an_offer_revoked_after_the_copy_is_not_confirmed(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    assert both.server.revoke(H1)
    assert not await fetched.release()
    both.check_baseline()


async def test_a_second_offer_of_the_same_blocks_owes_nothing_to_the_first(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    slots = [block.slot for block in blocks]
    both.prefill.hold(RunHolder(9), slots)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    both.server.revoke(H1)
    both.prefill.hold(H1, slots)
    ticket = both.server.offer(H1, kv_compat=COMPAT, on_done=both.on_done)
    assert not await fetched.release()
    again = await both.client.fetch(ticket, blocks, both.room(2, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    assert await again.release()
    assert both.ended == [(H1, Outcome.RELEASED)]


async def test_revoking_after_the_release_is_too_late(both: Rig) -> None:
    ticket, blocks = both.offer(1, 1)
    await (await both.client.fetch(ticket, blocks, both.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)).release()
    assert not both.server.revoke(H1)


async def test_closing_without_release_ends_the_offer_as_lost(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    async with await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S) as fetched:
        pass
    await until(lambda: both.ended == [(H1, Outcome.LOST)])
    both.check_baseline()
    assert not await fetched.release()


async def test_a_server_that_closes_confirms_nothing(both: Rig) -> None:
    ticket, blocks = both.offer(1, 2)
    unpresented, _ = both.offer(2, 2)
    fetched = await both.client.fetch(ticket, blocks, both.room(1, 2), kv_compat=COMPAT, timeout=PATIENCE_S)
    await both.server.close()
    assert not await fetched.release()
    assert sorted(both.ended, key=str) == [(H1, Outcome.LOST), (HandoffHolder(2), Outcome.LOST)]
    both.check_baseline()
    with pytest.raises(TransferError):
        await both.client.fetch(unpresented, [], [], kv_compat=COMPAT, timeout=PATIENCE_S)


async def test_eight_fetches_at_once_do_not_mix(both: Rig) -> None:
    offers = [both.offer(run, 4) for run in range(8)]
    expected = [both.contents(blocks) for _, blocks in offers]

    async def fetch(run: int) -> list[bytes]:
        ticket, blocks = offers[run]
        into = both.room(run, 4)
        async with await both.client.fetch(ticket, blocks, into, kv_compat=COMPAT, timeout=PATIENCE_S) as fetched:
            assert await fetched.release()
        return [bytes(view) for view in into]

    assert await asyncio.gather(*(fetch(run) for run in range(8))) == expected
    assert both.server.counts["released"] == 8
    both.check_baseline()


async def test_only_what_a_holder_has_can_be_offered_and_only_once(both: Rig) -> None:
    with pytest.raises(LedgerError):
        both.server.offer(H1, kv_compat=COMPAT, on_done=both.on_done)
    both.offer(1, 1)
    with pytest.raises(LedgerError):
        both.server.offer(H1, kv_compat=COMPAT, on_done=both.on_done)


async def test_nobody_at_the_address(both: Rig) -> None:
    ticket, blocks = both.offer(1, 1)
    for address in ("127.0.0.1:1", "nonsense"):
        elsewhere = msgspec.structs.replace(ticket, address=address, local=address)
        with pytest.raises((ConnectionLost, FetchTimeout)):
            await both.client.fetch(elsewhere, blocks, both.room(1, 1), kv_compat=COMPAT, timeout=PATIENCE_S)
        both.decode.release(RunHolder(1))
