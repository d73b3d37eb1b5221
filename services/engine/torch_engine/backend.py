"""What computes for the default engine on this machine, and what it promises: the C kernel or pure torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.runner import Runner
from services.kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class Backend:
    """`tokens`: how many the pool holds. `exact`: equal rows give equal bits whatever else a step computes.

    Workers whose `kv_dtype`, `layout` and `numerics` are equal read each other's KV blocks.
    """

    runner: Runner
    pool: BlockPool
    tokens: int
    kv_dtype: str
    layout: str
    numerics: str
    exact: bool
