"""Which model answers a request, as settings say it: aliases, what `auto` picks, and who answers in another model's place.

Owns the sections of `headrace.toml` and what is true of them whatever runs: which rule a request meets, whether they make sense
together. Must not know requests, tokens or processes. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

AUTO = "auto"
Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = get_args(Size)
Reason = Literal["no_worker", "no_capacity", "context_length"]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Hint = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
DEFAULT = "default"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Features:
    """What rules look at. `characters`: of all texts of the request; `turns`: messages of the user; `code`: some text looks like
    source code; `tools`: functions may be called; `hint`: what the caller says it needs, "" = nothing."""

    characters: int = 0
    turns: int = 1
    code: bool = False
    tools: bool = False
    hint: str = ""


class Rule(_Section):
    """Requests that meet all conditions get the model of size `use`. Bounds are inclusive; None = no bound, either."""

    use: Size
    min_characters: Count | None = None
    max_characters: Count | None = None
    min_turns: Count | None = None
    max_turns: Count | None = None
    code: bool | None = None
    tools: bool | None = None
    hint: Hint | None = None

    def meets(self, features: Features) -> bool:
        return (
            _within(features.characters, self.min_characters, self.max_characters)
            and _within(features.turns, self.min_turns, self.max_turns)
            and self.code in (None, features.code)
            and self.tools in (None, features.tools)
            and self.hint in (None, features.hint)
        )

    @property
    def kinds(self) -> str:
        """What it looks at, as it is told to callers."""
        looks = {
            "length": (self.min_characters, self.max_characters),
            "depth": (self.min_turns, self.max_turns),
            "code": (self.code,),
            "tools": (self.tools,),
            "hint": (self.hint,),
        }
        return "+".join(kind for kind, bounds in looks.items() if any(bound is not None for bound in bounds))


class AutoSettings(_Section):
    """What the model name `auto` stands for. The first rule that is met decides, `default` where none is; a hint that is a size
    decides before them. A size that has no model cannot be picked."""

    small: str | None = None
    medium: str | None = None
    large: str | None = None
    default: Size = "small"
    rules: tuple[Rule, ...] = Field((), max_length=16)

    @property
    def sizes(self) -> dict[Size, str]:
        """The model, or alias, of each size that has one."""
        named: dict[Size, str | None] = {"small": self.small, "medium": self.medium, "large": self.large}
        return {size: name for size, name in named.items() if name is not None}

    @property
    def hints(self) -> list[str]:
        """All that a request may say."""
        return [*self.sizes, *dict.fromkeys(rule.hint for rule in self.rules if rule.hint is not None)]

    def pick(self, features: Features) -> tuple[Size, str]:
        """A size, and what decided: `hint`, the kinds of a rule, or `default`."""
        for size in self.sizes:
            if features.hint == size:
                return size, "hint"
        for rule in self.rules:
            if rule.meets(features):
                return rule.use, rule.kinds
        return self.default, DEFAULT


class FallbackSettings(_Section):
    """`to`: who answers instead, tried in this order; `on`: when."""

    to: tuple[str, ...] = Field(min_length=1)
    on: tuple[Reason, ...] = get_args(Reason)


class SelectionSettings(_Section):
    """`aliases`: other names, of models, of other aliases, of `auto`. `fallback`: by model; a model that has none there is never
    replaced."""

    aliases: Mapping[str, str] = Field(default_factory=dict)
    auto: AutoSettings | None = None
    fallback: Mapping[str, FallbackSettings] = Field(default_factory=dict)

    def follow(self, name: str) -> tuple[str, ...]:
        """`name`, and what it stands for, to the first that is no alias. Ends for every selection that was checked."""
        names = [name]
        while (name := self.aliases.get(name, "")) and name not in names:
            names.append(name)
        return tuple(names)


def check(selection: SelectionSettings, models: Collection[str]) -> None:
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


def _within(value: int, least: int | None, most: int | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _unknown(name: str, models: Collection[str]) -> str:
    return f"there is no model {name!r}; there are {', '.join(sorted(models))}"
