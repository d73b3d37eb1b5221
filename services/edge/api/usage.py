"""OpenAI's usage object, and `cost` as OpenRouter's has it where a price is set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.edge.gate import records
from services.edge.gate.records import Used


@dataclass(frozen=True, slots=True)
class Usage:
    """`compute_s`: of prefill and of its share of decode steps, over all attempts. `price`: of such a second, None = not set."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    compute_s: float = 0.0
    price: float | None = None

    @property
    def cost(self) -> float | None:
        return records.cost(self.compute_s, self.price)

    def fields(self) -> dict[str, Any]:
        cost = {} if self.cost is None else {"cost": self.cost}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **cost,
        }

    def record(self, job: str, model: str) -> Used:
        """For the ledger."""
        return Used(job, model, self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.compute_s, self.cost)
