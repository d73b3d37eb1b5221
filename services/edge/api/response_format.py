"""`response_format` → the grammar that the answer must keep to. Pure functions; whether the grammar compiles is asked elsewhere.

The types `regex` ({"type": "regex", "pattern": …}) and `grammar` ({"type": "grammar", "grammar": Lark}) are ours. A schema is
kept to whether or not `strict` is set, and json_object needs no "JSON" in the messages: more than OpenAI's API promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.errors import InvalidRequest, UnsupportedParameter
from schemas.job import Grammar
from services.edge.api.names import read_name
from services.text.grammar import schema_source

_TYPES = ("text", "json_object", "json_schema", "regex", "grammar")


def read_response_format(value: Mapping[str, Any] | None) -> Grammar | None:
    """None for plain text. Raises `InvalidRequest` that names what is missing or wrong."""
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            if value.get("schema") is not None:  # other servers' word for json_schema
                raise UnsupportedParameter("A schema needs the type 'json_schema'.", param="response_format.schema")
            return Grammar(kind="json_object")
        case "json_schema":
            return _schema(_field(value, "json_schema", dict, "response_format"))
        case "regex":
            return Grammar(kind="regex", source=_field(value, "pattern", str, "response_format"))
        case "grammar":
            return Grammar(kind="grammar", source=_field(value, "grammar", str, "response_format"))
    raise InvalidRequest(f"'response_format.type' must be one of {', '.join(_TYPES)}.", param="response_format.type")


def _schema(value: Mapping[str, Any]) -> Grammar:
    at = "response_format.json_schema"
    read_name(value, at)
    if not isinstance(value.get("strict"), bool | None):
        raise InvalidRequest(f"'{at}.strict' must be a boolean.", param=f"{at}.strict")
    try:
        return Grammar(kind="json_schema", source=schema_source(_field(value, "schema", dict, at)))
    except ValueError as error:
        raise InvalidRequest(f"The schema in 'response_format' cannot be used: {error}.", param="response_format") from None


def _field(value: Mapping[str, Any], name: str, kind: type, at: str) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        wanted = "an object" if kind is dict else "a string"
        raise InvalidRequest(f"'{at}.{name}' must be {wanted}.", param=f"{at}.{name}")
    return found
