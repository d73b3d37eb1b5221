"""What this router says of each model: every 100 ms how many wait and how fast they leave, every second the model's card.

Also said when nothing waits: it is how edges know which routers live. Must not decide anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from schemas.codec import SchemaRange
from schemas.errors import BusError
from schemas.state import Capabilities, ModelCard, QueueReport, Role, WorkerState
from schemas.subjects import Subjects
from services.bus.interface import Bus
from services.bus.typed import send
from services.clock import Clock
from services.router.drain_rate import DrainRate
from services.router.view import View
from services.router.waiting import Waiting

REPORT_S = 0.1
CARD_S = 1.0


class Reporter:
    """`models` are reported even while no worker serves them."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        view: View,
        waiting: Waiting,
        drained: DrainRate,
        clock: Clock,
        models: Collection[str],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._view = view
        self._waiting = waiting
        self._drained = drained
        self._clock = clock
        self._models = frozenset(models)
        self._carded: dict[str, float] = {}

    async def run(self) -> None:
        """For as long as the router lives."""
        while True:
            models = self._view.models()
            self._carded = {model: at for model, at in self._carded.items() if model in models}
            for model in sorted(models | self._models):
                self.say(model)
            await asyncio.sleep(REPORT_S)

    def say(self, model: str) -> None:
        """One report, now, with the card when it is due. Nothing while the bus is down: a late one would be a lie."""
        states, now = self._view.states(model), self._clock.monotonic()
        serving = any(state.role is not Role.PREFILL for state in states)
        due = serving and now - self._carded.get(model, float("-inf")) >= CARD_S
        report = QueueReport(
            router=self._bus.process,
            model=model,
            waiting=self._waiting.by_tier(model),
            drain_rate=self._drained.of(model),
            schemas=self._bus.dialect.own,
            card=card(model, states) if due else None,
        )
        try:
            send(self._bus, self._subjects.queue(model), report)
        except BusError:
            return
        if due:
            self._carded[model] = now


def card(model: str, states: Sequence[WorkerState]) -> ModelCard:
    """What every one of its workers can do; the longest context any takes, because placement looks for one that fits."""
    return ModelCard(
        model=model,
        capabilities=_common([state.capabilities for state in states]),
        context_length=max(state.context_length for state in states),
        kv_tokens=max(state.kv_total * state.block_tokens for state in states if state.role is not Role.PREFILL),
        weights=tuple(sorted({state.weights for state in states})),
        schemas=SchemaRange(
            oldest=max(state.schemas.oldest for state in states), newest=min(state.schemas.newest for state in states)
        ),
    )


def _common(all_of: Sequence[Capabilities]) -> Capabilities:
    def every(name: str) -> bool:
        return all(getattr(one, name) for one in all_of)

    return Capabilities(
        seed=every("seed"),
        penalties=every("penalties"),
        n=every("n"),
        logprobs=every("logprobs"),
        top_k=every("top_k"),
        min_p=every("min_p"),
        logit_bias=every("logit_bias"),
        grammar=tuple(kind for kind in all_of[0].grammar if all(kind in one.grammar for one in all_of)),
        exact_resume=every("exact_resume"),
        cancel_during_handoff=every("cancel_during_handoff"),
        must_hand_off=any(one.must_hand_off for one in all_of),
        prompt_logprobs=every("prompt_logprobs"),
        adapters=tuple(name for name in all_of[0].adapters if all(name in one.adapters for one in all_of)),
    )
