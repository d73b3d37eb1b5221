"""Reads the settings of this process.

Invariant: a key that does not exist or a value that does not fit is an error that names the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.settings.errors import SettingsError
from services.settings.selection_check import check_selection
from services.settings.settings import ENV_PREFIX, Settings, config_file

_OTHER_VARIABLES = frozenset({"HEADRACE_CONFIG", "HEADRACE_URL", "HEADRACE_API_KEY"})


def load() -> Settings:
    """The settings of this process. Raises `SettingsError`."""
    path = config_file()
    unknown = sorted(name for name in os.environ if name.startswith(ENV_PREFIX) and not _known(name))
    if unknown:
        raise SettingsError(f"wrong settings: unknown variable {', '.join(unknown)}")
    if os.environ.get("HEADRACE_CONFIG") and not path.is_file():
        raise SettingsError(f"HEADRACE_CONFIG: there is no file {path}")
    try:
        settings = Settings()
    except ValidationError as error:
        raise SettingsError("wrong settings: " + "; ".join(map(_line, error.errors()))) from None
    except (ValueError, RecursionError) as error:  # a variable that is to be JSON and is not
        raise SettingsError(f"wrong settings: a variable: {error}") from None
    if key := next((key for key, text in _texts(settings.model_dump()) if "\0" in text), None):
        raise SettingsError(f"wrong settings: {key}: holds a NUL, which no name and no path can")
    _check_models(settings)
    return settings


def _check_models(settings: Settings) -> None:
    """Whether all that is said of models is of models there are. Raises `SettingsError`."""
    names = settings.served_names
    twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
    unpriced = next((name for name in settings.edge.model_prices if name not in names), None)
    if twice is not None:
        raise SettingsError(f"wrong settings: models: two are called {twice!r}")
    if unpriced is not None:
        raise SettingsError(f"wrong settings: edge.model_prices.{unpriced}: there is no such model; there are {', '.join(names)}")
    try:
        check_selection(settings.selection, names)
    except ValueError as error:
        raise SettingsError(f"wrong settings: {error}") from None


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text and path in `value`, with the key of each."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from ((key, str(name)), *_texts(inner, f"{key}.{name}".lstrip(".")))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str | Path):
        yield key, str(value)


def _line(item: ErrorDetails) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}"
    text = item["msg"].removeprefix("Value error, ")
    return f"{key}: {text}" if key else text


def _known(variable: str) -> bool:
    """Whether a variable is a setting or one of the few that are not; keys of sections are checked with their section."""
    return variable in _OTHER_VARIABLES or variable.removeprefix(ENV_PREFIX).split("__")[0].lower() in Settings.model_fields
