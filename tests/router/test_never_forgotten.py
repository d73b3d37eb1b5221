"""No state in which an admissible job is never placed: when the work of others has ended, nothing holds it back any more."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.job import Tier
from schemas.state import Role
from services.router.admission import Left, at_worker
from services.router.placement import Impossible, Local, NoCredit, Pair, place
from services.router.placement_request import Request
from services.router.placement_workers import Worker, pools
from tests.router.fakes import a_process
from tests.router.test_placement import worker

NOW = 100.0
NAMES = [a_process(f"w{number}") for number in range(6)]
rates = st.sampled_from([0.0, 0.0001, 0.01])
cluster = st.lists(
    st.builds(
        worker,
        process=st.sampled_from(NAMES),
        role=st.sampled_from(Role),
        kv_compat=st.sampled_from("ab"),
        context_length=st.sampled_from([64, 1024]),
        kv_total=st.sampled_from([8, 8, 8, 100, 0]),
        prefill_tokens=st.integers(-50, 200),
        draining=st.booleans(),
        free_at=st.floats(0.0, NOW),
        yield_s=st.sampled_from([0.0, 1.0]),
        token_s=rates,
        step_s=st.sampled_from([0.0, 0.03]),
        fetch_token_s=rates,
        host=st.sampled_from(["", "a"]),
    ),
    max_size=6,
    unique_by=lambda one: one.process,
)
requests = st.builds(
    Request,
    tokens=st.integers(1, 150) | st.integers(97, 112),  # the latter fill a worker of 8 blocks
    suspect=st.booleans(),
    hits=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9)),
    patience=st.floats(0.0, 10.0),
    urgent=st.booleans(),
)
lefts = st.builds(Left, queue_s=st.floats(-1.0, 10.0), first_token_s=st.floats(-1.0, 10.0))


def ended(one: Worker) -> Worker:
    """`one` after all it had to do."""
    return replace(one, queued=0, running=0, decode_slots=4, kv_blocks=one.kv_total)


def holds(one: Worker, request: Request, blocks: int) -> bool:
    return not one.draining and request.tokens < one.context_length and blocks <= one.kv_total


def admissible(workers: list[Worker], request: Request) -> bool:
    """By brute force over all pairs: somebody could run it, were it alone."""
    room = request.room(16)
    decode = [one for one in workers if one.role is not Role.PREFILL and holds(one, request, room)]
    prefill = [one for one in workers if one.role is Role.PREFILL and not one.draining]
    return any(
        one.role is Role.BOTH
        or not any(first.kv_compat == one.kv_compat for first in prefill)
        or any(first.kv_compat == one.kv_compat and holds(first, request, request.blocks(16)) for first in prefill)
        for one in decode
    )


@settings(max_examples=400)
@given(cluster, requests, st.sampled_from(Tier), lefts, st.integers(0, 2**32))
def test_who_fits_is_placed_once_the_others_are_done(
    workers: list[Worker], request: Request, tier: Tier, left: Left, seed: int
) -> None:
    """Whatever its tier, its patience, and what is left of its deadlines."""
    idle = [ended(one) for one in workers]
    decision = place(pools(idle), request, NOW, Random(seed))
    if isinstance(decision, Pair | Local):
        assert decision.why is not None
        assert at_worker(tier, decision.why, left) is None
    else:
        assert not admissible(idle, request)
        assert isinstance(decision, Impossible) or decision == NoCredit("no_pair")
