"""The default world of issue 5 and its knobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Rates in tokens a second, times in seconds, capacities in tokens.

    `step_target`: a decode worker that prefills a prompt's tail beside its batch cuts it so that no step takes longer.
    `queue_step`: seconds of work that a prefill worker takes in a step, and queues at most behind another prompt.
    `shorter_share`: what much shorter prompts get of each step while a long one has its turn; Headrace's engine gives them 0.75,
    in the world of issue 5 prompts are computed in turn, whoever's workers they are.
    """

    prefill_workers: int = 8
    prefill_rate: float = 20_000.0
    prefill_cache: int = 400_000
    decode_workers: int = 8
    batch: int = 64
    step: float = 0.015
    step_per_sequence: float = 0.0001
    decode_kv: int = 600_000
    step_target: float = 0.045
    queue_step: float = 0.06
    shorter_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request keeps to: TTFT <= `ttft` + uncached tokens / `ttft_rate`, the p95 of its token gaps <= `itl`."""

    ttft: float = 2.0
    ttft_rate: float = 8_000.0
    itl: float = 0.05

    def first_token(self, uncached: int) -> float:
        return self.ttft + uncached / self.ttft_rate
