"""Which version is written: what all that are heard can read, the oldest until that is known; what is newer is refused."""

from __future__ import annotations

import pytest

from schemas.codec import SCHEMA, SchemaRange, decode, encode, range_of, version_of
from schemas.errors import UnsupportedSchema
from schemas.state import Cause, Death
from services.bus.dialect import FORGET_S, SETTLE_S, Dialect
from services.clock import ManualClock

OLD, NEW = range_of(SCHEMA - 1), range_of(SCHEMA)
DEATH = Death(process="d1-mx235xkkixxjc", cause=Cause.LEFT)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def dialect(clock: ManualClock) -> Dialect:
    """One that has heard a peer of its own build for long enough."""
    dialect = Dialect(clock=clock)
    dialect.hear("e1", NEW)
    clock.advance(SETTLE_S)
    assert dialect.writes == SCHEMA
    return dialect


def test_who_has_nobody_to_agree_with_writes_its_newest() -> None:
    assert Dialect().writes == SCHEMA
    assert Dialect(SCHEMA - 1).writes == SCHEMA - 1


def test_a_beginner_writes_the_oldest_until_it_has_heard_everybody(clock: ManualClock) -> None:
    dialect = Dialect(clock=clock)
    assert dialect.writes == NEW.oldest
    clock.advance(SETTLE_S)
    assert dialect.writes == NEW.oldest  # it may be alone, or nothing reaches it
    dialect.hear("e1", NEW)
    assert dialect.writes == SCHEMA


def test_one_old_peer_is_enough_and_its_end_is_too(dialect: Dialect) -> None:
    dialect.hear("p1", OLD)
    assert dialect.writes == OLD.newest
    dialect.hear("p2", NEW)
    assert dialect.writes == OLD.newest
    dialect.gone("p1")
    dialect.hear("p3", NEW)
    assert dialect.writes == SCHEMA


def test_what_somebody_says_of_others_counts_for_as_long_as_it_is_said(dialect: Dialect) -> None:
    dialect.hear("r1", NEW)
    dialect.hear("r1", OLD, about="m")
    assert dialect.writes == OLD.newest
    dialect.hear("r1", NEW, about="m")
    assert dialect.writes == SCHEMA
    dialect.hear("r1", OLD, about="m")
    dialect.gone("r1")
    dialect.hear("r2", NEW)
    assert dialect.writes == SCHEMA


def test_a_silent_peer_is_forgotten_after_a_while(dialect: Dialect, clock: ManualClock) -> None:
    dialect.hear("p1", OLD)
    for _ in range(2):
        clock.advance(FORGET_S / 2)
        dialect.hear("e1", NEW)
    assert dialect.writes == SCHEMA


def test_after_an_outage_everybody_is_listened_for_again(dialect: Dialect, clock: ManualClock) -> None:
    dialect.restart()
    assert dialect.writes == NEW.oldest
    clock.advance(SETTLE_S)
    dialect.hear("e1", NEW)
    assert dialect.writes == SCHEMA


def test_among_newer_peers_the_own_newest_is_written(clock: ManualClock) -> None:
    """They read one version back, so not the oldest that we know."""
    dialect = Dialect(clock=clock)
    dialect.hear("e1", SchemaRange(oldest=SCHEMA, newest=SCHEMA + 1))
    assert dialect.writes == SCHEMA
    with pytest.raises(UnsupportedSchema):
        (other := Dialect(clock=clock)).decode(encode(Death(process=DEATH.process, cause=DEATH.cause, schema=SCHEMA + 1)), Death)
    assert other.writes == SCHEMA


def test_messages_are_written_as_agreed_and_relayed_ones_stay(dialect: Dialect) -> None:
    dialect.hear("p1", OLD)
    data = dialect.encode(DEATH)
    assert version_of(data) == OLD.newest
    assert decode(data, Death) == Death(process=DEATH.process, cause=DEATH.cause, schema=OLD.newest)
    assert version_of(dialect.encode(DEATH, SCHEMA)) == SCHEMA
    dialect.gone("p1")
    dialect.hear("p2", NEW)
    assert version_of(dialect.encode(decode(data, Death))) == OLD.newest


def test_an_old_build_refuses_what_is_new() -> None:
    old = Dialect(SCHEMA - 1)
    assert old.own == OLD
    assert old.decode(old.encode(DEATH), Death).cause is Cause.LEFT
    with pytest.raises(UnsupportedSchema):
        old.decode(Dialect().encode(DEATH), Death)
    assert version_of(b"\xc1") is None
