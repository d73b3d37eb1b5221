"""Which model answers a request, as settings say it: aliases, what `auto` picks, and who answers in another model's place.

Owns the sections of `headrace.toml`, and which of their rules a request meets. Must not know requests, tokens or processes. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from services.settings.section import LARGEST, Section

AUTO = "auto"
Size = Literal["small", "medium", "large"]
SIZES: tuple[Size, ...] = get_args(Size)
Reason = Literal["no_worker", "no_capacity", "context_length"]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Hint = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Features:
    """What rules look at. `characters`: of all texts of the request; `turns`: messages of the user; `code`: some text looks like
    source code; `tools`: functions may be called; `hint`: what the caller says it needs, "" = nothing."""

    characters: int = 0
    turns: int = 1
    code: bool = False
    tools: bool = False
    hint: str = ""


class Rule(Section):
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


class AutoSettings(Section):
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


class FallbackSettings(Section):
    """`to`: who answers instead, tried in this order; `on`: when."""

    to: tuple[str, ...] = Field(min_length=1)
    on: tuple[Reason, ...] = get_args(Reason)


class SelectionSettings(Section):
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


def _within(value: int, least: int | None, most: int | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)
