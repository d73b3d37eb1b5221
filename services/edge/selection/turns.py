"""One request, one model after another until one takes it, as the plan says.

Owns the order of the tries. Invariants: each model is tried once; the next one only for a reason that the plan names, and before
anything was written; all of them together have the time that one would have had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from schemas.errors import HeadraceError, InvalidRequest, ModelNotFound
from schemas.explanation import Explanation
from services.edge.api.answer import AnyAnswer
from services.edge.api.measure import Measure
from services.edge.api.request import GenerationRequest
from services.edge.api.served import Served
from services.edge.gate.records import Caller
from services.edge.jobs.draft import Draft, Limits
from services.edge.selection import told
from services.edge.selection.features import read_hint
from services.edge.selection.policy import Plan, leads_to_auto, plan, served_as, without_adapter
from services.settings.selection import Features

R = TypeVar("R", bound=GenerationRequest)
B = TypeVar("B")
FeaturesOf = Callable[[str], Features]
"""What a request is like, its caller's hint given."""
Tell = Callable[[dict[str, str]], None]
"""Takes the headers that the caller gets with whatever comes; the last ones count."""
UNSUITED = "unsuited"
"""A model that was to answer in another's place cannot do what was asked: no reason to tell the caller that nobody could."""
_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks, over whatever transport, and what is measured of it. `hint`: a header's."""

    caller: Caller
    tell: Tell
    measure: Measure
    hint: str | None = None

    def names(self, served: Served, model: object) -> None:
        """What its request says that is to answer, whatever becomes of it."""
        self.measure.model = served_as(served.names, model)


@dataclass(frozen=True, slots=True)
class Turn:
    """One model's try. `served`: with this model's text. `explain`: takes what its router said of a try that was refused.
    `spent`: seconds that others took before it. `alone`: nobody else may answer. `elsewhere`: somebody else does where this
    model has no worker. `adapter`: of the model, to answer with."""

    served: Served
    explain: Callable[[Explanation], None]
    spent: float = 0.0
    alone: bool = True
    elsewhere: bool = False
    adapter: str | None = None

    def draft(self, draft: Draft) -> Draft:
        """The job of this turn: with its adapter, no later than the first one's would have been, and not to wait for a worker
        that is gone where another model has some. Raises `ModelNotFound` for an adapter that the model has not."""
        if self.adapter is not None:
            if self.adapter not in self.served.card().capabilities.adapters:
                raise ModelNotFound(f"The model {draft.model!r} has no adapter {self.adapter!r}.", param="model")
            draft = replace(draft, adapter=self.adapter)
        limits = draft.limits
        left = (max(limit - self.spent, _LEAST_S) for limit in (limits.queue_s, limits.first_token_s, limits.total_s))
        return draft if self.alone else replace(draft, limits=Limits(*left), elsewhere=self.elsewhere)

    async def admitted(self, answer: AnyAnswer) -> None:
        """Where others may answer: once the model has taken the job. That takes the time of a few submits at most, after which
        a client that left meanwhile is noticed. Raises what refused it."""
        if self.alone:
            return
        try:
            await answer.admitted()
        except BaseException:
            if answer.explanation is not None:
                self.explain(answer.explanation)
            answer.cancel()
            raise


def planned(served: Served, by: Asking, model: str, features: FeaturesOf, metadata: Any = None, *, portable: bool = True) -> Plan:
    """Who answers a request for `model`. `features` are made only if they are needed. Raises as `plan`."""
    names, granted = served.names, by.caller.models
    base, adapter = without_adapter(names, model)
    if adapter is not None and granted is not None and model in granted:
        granted = None  # a key may list an adapter alone
    seen = features(read_hint(by.hint, metadata)) if leads_to_auto(names, base) else Features()
    made = plan(names, base, seen, served.alive, granted, portable=portable and adapter is None)
    return replace(made, adapter=adapter)


async def first_to_take(served: Served, by: Asking, plan: Plan, asked: R, begin: Callable[[Turn, R], Awaitable[B]]) -> B:
    """What `begin` makes of the request with the first model that takes it.

    Raises the `HeadraceError` of a model that may take it later, if there is one, else of the one that was asked for.
    """
    arrived, alone = served.clock.monotonic(), len(plan.candidates) == 1
    last = [model for model in plan.candidates if model not in plan.dead][-1]
    passed: list[tuple[str, str]] = []
    refusals: list[tuple[str, HeadraceError]] = []
    explained: dict[str, Explanation] = {}

    def tell_of(model: str) -> None:
        by.tell(told.headers(plan, model, passed, explained.get(model)))
        by.measure.model = model

    for model in plan.candidates:
        if model in plan.dead:
            passed.append((model, "no_worker"))
            continue
        tell_of(model)
        elsewhere = "no_worker" in plan.on and model != last
        explain = partial(explained.__setitem__, model)
        turn = Turn(served.of(model), explain, served.clock.monotonic() - arrived, alone, elsewhere, plan.adapter)
        try:
            begun = await begin(turn, asked if asked.model == model else asked.model_copy(update={"model": model}))
        except HeadraceError as error:
            reason = plan.reason(error) or (UNSUITED if passed and isinstance(error, InvalidRequest) else None)
            if reason is None:
                tell_of(model)
                raise
            refusals.append((model, error))
            passed.append((model, reason))
            continue
        for before, reason in passed:
            served.metrics.model_fallbacks.add(1, {"model": before, "to": model, "reason": reason})
        return begun
    model, refusal = next((one for one in refusals if one[1].retryable), refusals[0])
    tell_of(model)
    raise refusal
