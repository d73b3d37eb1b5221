"""Reads headrace.toml.

Invariant: what is wrong in it is named, and no key is lost to another one that is spelled almost like it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, TomlConfigSettingsSource

from services.settings.errors import SettingsError

_LINE = re.compile(r"\(at line (\d+)")
_KEY = re.compile(r"""[\s\[]*([\w.\-"' ]{1,100}?)\s*[]=]""")


class ConfigFile(TomlConfigSettingsSource):
    """Its keys are exact: pydantic-settings by itself takes any case, and of `[edge]` and `[Edge]` one."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path) -> None:
        super().__init__(settings_cls, path)
        if unknown := [key for key in self.toml_data if key not in settings_cls.model_fields]:
            raise SettingsError(f"wrong settings: {'; '.join(f'unknown key {key}' for key in unknown)}")

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        text = ""
        try:
            text = file_path.read_bytes().decode("utf-8")
            return tomllib.loads(f"{text}\n")  # what is wrong at its very end has no line otherwise
        except (OSError, ValueError, RecursionError) as error:
            raise SettingsError(f"{file_path}: {error}{_key(text, str(error))}") from None


def _key(text: str, error: str) -> str:
    """What is set in the line that `error` tells; never its value, which may be a password."""
    at = _LINE.search(error)
    found = _KEY.match(text.split("\n")[int(at[1]) - 1]) if at else None
    return f": {found[1]}" if found else ""
