"""The name of a function, or of a schema, in a request: the same rule for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.errors import InvalidRequest
from services.text.tools.names import RULE, is_name


def read_name(about: Mapping[str, Any], at: str) -> str:
    """The field `name` of what stands at `at`. Raises `InvalidRequest`."""
    name = about.get("name")
    if not isinstance(name, str) or not is_name(name):
        raise InvalidRequest(f"'{at}.name' must be {RULE}.", param=f"{at}.name")
    return name
