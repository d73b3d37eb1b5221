"""Settings, what a request is like, and the models that live → who answers it, who else may, and why. Pure functions.

Invariants: nobody else answers unless `selection.fallback` says so; nobody answers whom the caller's key does not allow; each
model is named once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from schemas.errors import (
    ContextLengthExceeded,
    HeadraceError,
    InvalidRequest,
    ModelLoading,
    ModelNotFound,
    NoWorker,
    Overloaded,
    PermissionDenied,
    Unavailable,
)
from services.settings.selection import AUTO, AutoSettings, Features, Reason, SelectionSettings, Size

_REASONS: dict[type[HeadraceError], Reason] = {
    NoWorker: "no_worker",
    ModelLoading: "no_worker",
    Unavailable: "no_capacity",
    Overloaded: "no_capacity",
    ContextLengthExceeded: "context_length",
}
"""Exactly these: what is derived from them (no bus, no database, an edge that is full or cannot check a limit) is no fault of
the model."""
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Names:
    """What a request may name: models, and what stands for them."""

    selection: SelectionSettings
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`candidates`: the model that was asked for, then those that may answer in its place, `on` which refusals. `dead`: those of
    them that are passed over, because they have no worker and another one has. `via`: the name that was asked for is a model's
    own, an alias, or leads to `auto`, which picked `size` because of `rule`. `adapter`: of that model, which nobody else has."""

    candidates: tuple[str, ...]
    via: str
    size: Size | None = None
    rule: str = ""
    on: frozenset[Reason] = frozenset()
    dead: frozenset[str] = frozenset()
    adapter: str | None = None

    def reason(self, refusal: HeadraceError) -> Reason | None:
        """Why the next candidate is tried after `refusal`; None = it is not."""
        reason = _REASONS.get(type(refusal))
        return reason if reason in self.on else None


def without_adapter(names: Names, asked: str) -> tuple[str, str | None]:
    """What was asked for, and the adapter that it names behind a colon, if what stands before that is a model or leads to one."""
    model, colon, adapter = asked.rpartition(":")
    itself = asked in names.models or names.selection.follow(asked) != (asked,)
    if not colon or itself or len(adapter) > _LONGEST or names.selection.follow(model)[-1] not in names.models:
        return asked, None
    return model, adapter


def leads_to_auto(names: Names, asked: str) -> bool:
    return names.selection.auto is not None and names.selection.follow(asked)[-1] == AUTO


def served_as(names: Names, asked: object) -> str:
    """What `asked` stands for, of what is served, else "": one of a few, whatever is asked for. An adapter is its model."""
    end = names.selection.follow(without_adapter(names, asked)[0])[-1] if isinstance(asked, str) else ""
    return end if end in names.models or (end == AUTO and names.selection.auto is not None) else ""


def plan(
    names: Names,
    asked: str,
    features: Features,
    alive: Collection[str],
    granted: Collection[str] | None = None,
    *,
    portable: bool = True,
) -> Plan:
    """Who answers a request for `asked`. `alive`: models that have workers; `granted`: what the caller may use, None = all: a
    name covers whatever it stands for, a model itself only. `portable`: the request means the same to every model.

    Raises `ModelNotFound`, `PermissionDenied`; `InvalidRequest` for a hint that nobody knows, or for `auto` when not `portable`.
    """
    chain, auto, size, rule = names.selection.follow(asked), names.selection.auto, None, ""
    if auto is not None and chain[-1] == AUTO:
        size, rule = _pick(auto, features, portable)
        chain += names.selection.follow(auto.sizes[size])
    candidates = _candidates(names, chain, granted)
    fallback = names.selection.fallback.get(candidates[0])
    if fallback is None or not portable:
        return Plan(candidates[:1], _via(chain, size), size, rule)
    on = frozenset(fallback.on)
    dead = frozenset(candidates) - frozenset(alive) if "no_worker" in on else frozenset()
    dead = frozenset() if len(dead) == len(candidates) else dead  # all of them: the one that was asked for says so
    return Plan(candidates, _via(chain, size), size, rule, on, dead)


def offered(names: Names, alive: Collection[str], granted: Collection[str] | None = None) -> list[str]:
    """What a caller may ask for now, models first: each name for which somebody would answer."""
    auto = [AUTO] if names.selection.auto is not None else []
    listed = (*names.models, *names.selection.aliases, *auto)
    return [name for name in listed if _is_offered(names, name, alive, granted)]


def must_be_offered(names: Names, asked: str, alive: Collection[str], granted: Collection[str] | None = None) -> None:
    """Raises `ModelNotFound` for what is not there, or not now; `PermissionDenied` for what is not the caller's."""
    chain = names.selection.follow(asked)
    if chain[-1] in names.models:
        _candidates(names, chain, granted)
    if not _is_offered(names, asked, alive, granted):
        raise _unknown(asked)


def _is_offered(names: Names, asked: str, alive: Collection[str], granted: Collection[str] | None) -> bool:
    chain, auto = names.selection.follow(asked), names.selection.auto
    if auto is None or chain[-1] != AUTO:
        return _answered(names, chain, alive, granted)
    return any(_answered(names, chain + names.selection.follow(size), alive, granted) for size in auto.sizes.values())


def _answered(names: Names, chain: Sequence[str], alive: Collection[str], granted: Collection[str] | None) -> bool:
    try:
        candidates = _candidates(names, chain, granted)
    except (ModelNotFound, PermissionDenied):
        return False
    fallback = names.selection.fallback.get(candidates[0])
    replaceable = fallback is not None and "no_worker" in fallback.on
    return not frozenset(candidates if replaceable else candidates[:1]).isdisjoint(alive)


def _candidates(names: Names, chain: Sequence[str], granted: Collection[str] | None) -> tuple[str, ...]:
    """The end of `chain`, and those that `granted` lets answer in its place. Raises `ModelNotFound`, `PermissionDenied`."""
    asked, model = chain[0][:_LONGEST], chain[-1]
    if model not in names.models:
        raise _unknown(asked)
    covered = granted is None or any(name in granted for name in chain if name != model)

    def may(name: str) -> bool:
        return covered or (granted is not None and name in granted)

    if not may(model):
        which = f"{asked!r}" if chain[0] == model else f"{model!r}, for which {asked!r} stands"
        raise PermissionDenied(f"This key may not use the model {which}.", param="model")
    fallback = names.selection.fallback.get(model)
    others = [names.selection.follow(name)[-1] for name in fallback.to] if fallback is not None else []
    return (model, *filter(may, others))


def _unknown(asked: str) -> ModelNotFound:
    return ModelNotFound(f"The model {asked[:_LONGEST]!r} does not exist.", param="model")


def _pick(auto: AutoSettings, features: Features, portable: bool) -> tuple[Size, str]:
    if not portable:
        ids = "token ids ('prompt', 'logit_bias', 'stop_token_ids') belong to one model"
        raise InvalidRequest(f"'auto' takes text only: {ids}.", param="model")
    if features.hint and features.hint not in auto.hints:
        known = ", ".join(auto.hints)
        raise InvalidRequest(f"There is no hint {features.hint[:_LONGEST]!r}; there are {known}.", param="headrace_hint")
    return auto.pick(features)


def _via(chain: Sequence[str], size: Size | None) -> str:
    return AUTO if size is not None else "alias" if len(chain) > 1 else "named"
