"""What an extra of ours brings, from the metadata of what is installed here, and whether it goes together with given pins."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def closure(extras: Iterable[str], python: str) -> dict[str, SpecifierSet]:
    """Every package that `headrace[extras]` needs on Linux with that Python, by canonical name, and which versions of it.

    Raises PackageNotFoundError for one that is not installed here, so that its needs cannot be known.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found: dict[str, SpecifierSet] = {}
    waiting = [*map(Requirement, PROJECT["dependencies"]), *(Requirement(f"headrace[{extra}]") for extra in extras)]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        name = canonicalize_name(requirement.name)
        if name != "headrace":
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
        waiting += _needs(requirement, environment)
    return found


def _needs(requirement: Requirement, environment: dict[str, str]) -> Iterator[Requirement]:
    if requirement.name == "headrace":
        for extra in requirement.extras:
            yield from map(Requirement, EXTRAS[extra])
        return
    for text in distribution(requirement.name).requires or ():
        need = Requirement(text)
        if any(
            need.marker is None or need.marker.evaluate({**environment, "extra": extra}) for extra in ("", *requirement.extras)
        ):
            yield need


def contradictions(needed: dict[str, SpecifierSet], pins: Iterable[str]) -> list[str]:
    """The pins that leave no version of a package that is needed. A version counts if one of the two sides names it, or if it is
    installed here."""
    wrong = []
    for pin in map(Requirement, pins):
        name = canonicalize_name(pin.name)
        if name not in needed:
            continue
        both = needed[name] & pin.specifier
        candidates = [Version(specifier.version.rstrip(".*")) for specifier in both]
        candidates += [Version(distribution(name).version)] if _installed(name) else []
        if not any(both.contains(version, prereleases=True) for version in candidates):
            wrong.append(f"{pin} leaves no {name}{needed[name]}")
    return wrong


def wrong_python(needed: Iterable[str], python: str) -> list[str]:
    """The packages that do not run on that Python."""
    return [
        name
        for name in needed
        if not SpecifierSet(distribution(name).metadata.get("Requires-Python") or "").contains(f"{python}.9")
    ]


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
