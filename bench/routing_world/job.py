"""One request on its way through the simulated cluster, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.routing_world.trace import Row


@dataclass(slots=True, eq=False)
class SimJob:
    """`arrived`: on the scaled time axis. `urgent`: prefill workers compute it before others, as `services.engine.scheduler`.

    `uncached`: tokens that were computed, `placed_uncached`: expected by its router.

    `gap_p95`: of its token gaps, in seconds.
    """

    row: Row
    arrived: float
    number: int
    urgent: bool = False
    prefill: int = -1
    decode: int = -1
    uncached: int = 0
    placed_uncached: int = 0
    ttft: float = -1.0
    finished: float = -1.0
    gap_p95: float = 0.0
    gap_mean: float = 0.0
    refused: bool = False
    histogram: list[float] = field(default_factory=list)
    joined: float = 0.0

    @property
    def prompt(self) -> int:
        return self.row.prompt

    @property
    def blocks(self) -> tuple[bytes, ...]:
        return self.row.blocks
