"""What an endpoint makes of a request, whatever carries it: an answer that computes, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass

from services.edge.api.answer import AnyAnswer
from services.edge.api.exchange import Exchange, Pace, Streamed, Whole
from services.edge.api.form import Form
from services.edge.api.measure import Measure
from services.edge.gate.meter import Reservation


@dataclass(frozen=True, slots=True)
class Begun:
    """Its answer has to be read, or cancelled. `model`: whose it is. `stream`: it is written as it comes."""

    answer: AnyAnswer
    form: Form
    reservation: Reservation
    model: str
    stream: bool

    def exchange(self, request_id: str, pace: Pace, measure: Measure) -> Exchange:
        kind = Streamed if self.stream else Whole
        return kind(self.answer, self.form, self.reservation, request_id, pace, measure)
