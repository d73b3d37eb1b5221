"""What every endpoint works with, for one model of those that are served: its text, and what its workers offer now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from schemas.errors import BusUnavailable, NoWorker
from schemas.state import ModelCard
from services.clock import Clock
from services.edge.api.ports import Jobs, TextModel
from services.edge.gate.meter import Meter
from services.edge.selection.policy import Names
from services.settings.edge import EdgeSettings
from services.settings.selection import SelectionSettings
from services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Served:
    """`text`: of the model at hand, at first the default one. `texts`: of all, by name; empty when there is but one. `started` is
    the process's, Unix seconds."""

    settings: EdgeSettings
    jobs: Jobs
    text: TextModel
    meter: Meter
    clock: Clock
    random: Random
    metrics: Metrics
    started: int
    texts: Mapping[str, TextModel] = field(default_factory=dict)
    selection: SelectionSettings = field(default_factory=SelectionSettings)

    @property
    def names(self) -> Names:
        """What may be asked for."""
        return Names(self.selection, tuple(self.texts) or (self.text.name,))

    @property
    def alive(self) -> list[str]:
        """The models that have workers now."""
        return [model for model in self.names.models if self.jobs.card(model) is not None]

    def adapters(self, model: str) -> tuple[str, ...]:
        """Of a model, as far as it has workers now."""
        card = self.jobs.card(model)
        return () if card is None else card.capabilities.adapters

    def of(self, model: str) -> Served:
        """The same for another model, one of `names.models`."""
        return self if model == self.text.name else replace(self, text=self.texts[model])

    def card(self) -> ModelCard:
        """What the model's workers offer. Raises `BusUnavailable`, `NoWorker`."""
        model = self.text.name
        card = self.jobs.card(model)
        if card is None and not self.jobs.connected:
            raise BusUnavailable("The service is reconnecting.", retry_after=1.0)
        if card is None:
            raise NoWorker("No worker serves this model now.", retry_after=self.jobs.retry_after(model))
        return card
