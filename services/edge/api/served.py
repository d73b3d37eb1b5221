"""What every endpoint works with, and the one question each of them asks first: is this model served now?"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from schemas.errors import BusUnavailable, ModelNotFound, PermissionDenied, Unavailable
from schemas.state import ModelCard
from services.clock import Clock
from services.edge.api.ports import Jobs, TextModel
from services.edge.gate.meter import Meter
from services.edge.gate.records import Caller
from services.settings import EdgeSettings
from services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Served:
    """`started` is the process's, Unix seconds."""

    settings: EdgeSettings
    jobs: Jobs
    text: TextModel
    meter: Meter
    clock: Clock
    random: Random
    metrics: Metrics
    started: int

    def must_offer(self, model: str, caller: Caller) -> None:
        """Raises `ModelNotFound` for a model that is not ours, `PermissionDenied` for one that is not the caller's."""
        if model != self.text.name:
            raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")
        if not caller.may_use(model):
            raise PermissionDenied(f"This key may not use the model {model[:100]!r}.", param="model")

    def card(self, model: str, caller: Caller) -> ModelCard:
        """What the model's workers offer. Raises `ModelNotFound`, `PermissionDenied`, `BusUnavailable`, `Unavailable`."""
        self.must_offer(model, caller)
        card = self.jobs.card(model)
        if card is None and not self.jobs.connected:
            raise BusUnavailable("The service is reconnecting.", retry_after=1.0)
        if card is None:
            raise Unavailable("No worker serves this model now.", retry_after=self.jobs.retry_after(model))
        return card
