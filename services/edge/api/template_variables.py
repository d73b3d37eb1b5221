"""`chat_template_kwargs`: variables for the model's chat template, as vLLM and SGLang take them. Shapes and bounds only; pure.

Qwen3 is told in this way not to think: `{"enable_thinking": false}`. Which names a template's own are, it says itself
(`services.text.template`). Invariant: small, flat, and of no number that could make a template write much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.errors import InvalidRequest

NAME = "chat_template_kwargs"
_MOST_BYTES = 8192
_LARGEST = 1_000_000


def read_variables(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Null is the same as none. Raises `InvalidRequest` that names the place."""
    variables = value or {}
    if len(msgspec.json.encode(variables)) > _MOST_BYTES:
        raise InvalidRequest(f"'{NAME}' may be at most {_MOST_BYTES} bytes of JSON.", param=NAME)
    for name, variable in variables.items():
        param = f"{NAME}.{name}"
        if not name.isidentifier():
            raise InvalidRequest(f"'{param}' is no name of a variable.", param=param)
        inner = variable.values() if isinstance(variable, dict) else variable if isinstance(variable, list) else (variable,)
        if any(isinstance(item, dict | list) for item in inner):
            raise InvalidRequest(f"'{param}' may hold a value, or an object or array of values, and no more.", param=param)
        if any(isinstance(item, int | float) and abs(item) > _LARGEST for item in inner):
            raise InvalidRequest(f"Numbers in '{param}' may be at most {_LARGEST}.", param=param)
    return variables
