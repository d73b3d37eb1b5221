"""Whether what is said of model selection can be kept to: with the models there are, and with itself. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from services.settings.selection import AUTO, SIZES, AutoSettings, Features, Rule, SelectionSettings


def check_selection(selection: SelectionSettings, models: Collection[str]) -> None:
    """Whether it can be kept to with these `models`. Raises ValueError that names the key which cannot."""
    for where, problem in _problems(selection, models):
        raise ValueError(f"selection.{where}: {problem}")


def _problems(selection: SelectionSettings, models: Collection[str]) -> Iterator[tuple[str, str]]:
    auto = selection.auto
    if auto is not None and AUTO in models:
        yield AUTO, "a model has this name"
    for alias, target in selection.aliases.items():
        where, names = f"aliases.{alias}", selection.follow(alias)
        if alias in models or alias in ("", AUTO):
            yield where, "a model's name, auto, and an empty one cannot be aliases"
        elif names[-1] in selection.aliases:
            yield where, f"leads back to itself ({' → '.join((*names, selection.aliases[names[-1]]))})"
        elif names[-1] not in models and (names[-1] != AUTO or auto is None):
            yield where, _unknown(target if target not in selection.aliases else names[-1], models)
    if auto is not None:
        yield from ((f"auto.{key}", problem) for key, problem in _problems_of_auto(selection, auto, models))
    for model, fallback in selection.fallback.items():
        if model not in models:
            yield (
                f"fallback.{model}",
                "it is of a model, not of an alias" if model in selection.aliases else _unknown(model, models),
            )
        before = [model]
        for at, name in enumerate(fallback.to):
            where, end = f"fallback.{model}.to.{at}", selection.follow(name)[-1]
            if end not in models:
                yield where, _unknown(name, models)
            if end in before:
                yield where, f"{name} is tried before"
            before.append(end)


def _problems_of_auto(selection: SelectionSettings, auto: AutoSettings, models: Collection[str]) -> Iterator[tuple[str, str]]:
    for size, name in auto.sizes.items():
        if selection.follow(name)[-1] not in models:
            yield size, "leads back to auto" if selection.follow(name)[-1] == AUTO else _unknown(name, models)
    if auto.default not in auto.sizes:
        yield "default", f"{auto.default} has no model"
    for at, rule in enumerate(auto.rules):
        if rule.use not in auto.sizes:
            yield f"rules.{at}.use", f"{rule.use} has no model"
        if rule.hint in SIZES:
            yield f"rules.{at}.hint", f"{rule.hint} is a size, which decides before all rules"
        if not rule.kinds:
            yield f"rules.{at}", "has no condition: what no rule matches gets the default"
        if not _can_match(at, auto.rules):
            yield f"rules.{at}", "can never match: its bounds leave nothing, or the rules before it match first"


def _can_match(at: int, rules: Sequence[Rule]) -> bool:
    """Whether some request meets rule `at` and none before it. Rules are boxes, so the lower corners of all that is left between
    them are enough to look at."""
    rule, before = rules[at], rules[:at]
    characters = _corners([(one.min_characters, one.max_characters) for one in rules])
    turns = _corners([(one.min_turns, one.max_turns) for one in rules])
    points = (Features(*point, rule.hint or "") for point in product(characters, turns, (False, True), (False, True)))
    return any(rule.meets(point) and not any(one.meets(point) for one in before) for point in points)


def _corners(bounds: Sequence[tuple[int | None, int | None]]) -> list[int]:
    lows = {low for low, _ in bounds if low is not None}
    return sorted({0, *lows, *(high + 1 for _, high in bounds if high is not None)})


def _unknown(name: str, models: Collection[str]) -> str:
    return f"there is no model {name!r}; there are {', '.join(sorted(models))}"
