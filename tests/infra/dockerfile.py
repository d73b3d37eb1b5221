"""As much of a Dockerfile as our tests look at: stages and their instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """`ENV`, `COPY`, …, and the rest of its line, continuations joined."""

    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """Its arguments without flags; of the JSON form, the list."""
        if self.rest.startswith("["):
            return [str(word) for word in json.loads(self.rest)]
        return [word for word in self.rest.split() if not word.startswith("--")]

    @property
    def flags(self) -> dict[str, str]:
        pairs = (word[2:].partition("=") for word in self.rest.split() if word.startswith("--"))
        return {name: value for name, _, value in pairs}


@dataclass(slots=True)
class Stage:
    """`base` with its variables replaced by their defaults."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name == name]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    path: Path
    stages: list[Stage]

    def lineage(self, stage: Stage) -> list[Instruction]:
        """What holds in `stage`: its own instructions behind those of the stages it is built on."""
        (*_, below) = [None, *(other for other in self.stages if other.name == stage.base)]
        return [*(self.lineage(below) if below else []), *stage.instructions]

    @property
    def images(self) -> list[Stage]:
        """The stages that are shipped: all that nothing is built on or copied from."""
        used = {stage.base for stage in self.stages}
        used |= {copy.flags.get("from", "") for stage in self.stages for copy in stage.all("COPY")}
        return [stage for stage in self.stages if stage.name not in used]


def read(path: Path) -> Dockerfile:
    lines = (line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    defaults: dict[str, str] = {}
    stages: list[Stage] = []
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            base = _VARIABLE.sub(lambda match: defaults[match[1]], base)
            stages.append(Stage(alias.strip() or str(len(stages)), base))
        elif name == "ARG" and not stages:
            key, _, value = rest.partition("=")
            defaults[key] = value
        elif name:
            stages[-1].instructions.append(Instruction(name, rest.strip()))
    return Dockerfile(path, stages)
