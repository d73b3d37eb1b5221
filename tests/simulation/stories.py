"""Plans made by hand, for rules that want a certain fault at a certain moment. Calm weather, one client a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.job import Sampling, Tier
from tests.simulation.plan import FIRST_S, Client, Engine, Fault, Plan

ENGINE = Engine(blocks=400, max_batch=8, prefill_token_s=0.001, decode_step_s=0.05, block_s=0.0)


def story(
    *faults: Fault,
    clients: int = 4,
    tokens: int = 80,
    prefill: int = 2,
    decode: int = 2,
    both: int = 0,
    routers: int = 2,
    edges: int = 1,
    engine: Engine = ENGINE,
    at: Sequence[float] = (),
) -> Plan:
    """`clients` ask for `tokens` each, at `FIRST_S` or when `at` says; times of `faults` are from the start of the cluster."""
    made = tuple(_client(number, tokens, at[number] if at else FIRST_S) for number in range(clients))
    processes = edges + routers + prefill + decode + both
    zeros = (0.0,) * processes
    return Plan(0, edges, routers, prefill, decode, both, engine, made, faults, (), zeros, zeros)


def _client(number: int, tokens: int, at: float) -> Client:
    return Client(
        at=at,
        edge=0,
        prompt=tuple(range(10 + number, 18 + number)),
        sampling=Sampling(seed=number, max_tokens=tokens),
        tier=Tier.PAID,
        lane=number % 16,
        queue_s=30.0,
        first_token_s=30.0,
        total_s=60.0,
        gives_up_s=None,
        gives_up_at=None,
    )
