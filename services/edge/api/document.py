"""What the OpenAPI document says of bodies and refusals. For people and for programs that generate requests: nothing here checks.

Bodies are read by `body` and `request`, not by the framework, so the framework is told their schemas by hand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel, WithJsonSchema

_STRING, _OBJECT = {"type": "string"}, {"type": "object"}
_NULLABLE = {"type": "null"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
MESSAGES = WithJsonSchema(
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [
                        _STRING,
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {"type": {"const": "text"}, "text": _STRING},
                            },
                        },
                        _NULLABLE,
                    ]
                },
                "name": _STRING,
                "tool_call_id": _STRING,
                "tool_calls": {"type": "array", "items": _OBJECT},
            },
        },
    }
)
PROMPT = WithJsonSchema(
    {"anyOf": [_STRING, _IDS, *({"type": "array", "items": each, "minItems": 1} for each in (_STRING, _IDS))]}
)
BIASES = WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})
STOP = WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING}, _NULLABLE]})
TOOL_CHOICE = WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT, _NULLABLE]})
ITEMS = WithJsonSchema({"type": "array", "items": _OBJECT})
INPUT = WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _OBJECT, "minItems": 1}]})
CONVERSATION = WithJsonSchema({"anyOf": [_STRING, {"type": "object", "properties": {"id": _STRING}}, _NULLABLE]})

_NULL_OR_STRING = {"anyOf": [_STRING, _NULLABLE]}
_ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _STRING, "type": _STRING, "param": _NULL_OR_STRING, "code": _NULL_OR_STRING},
        }
    },
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": about, "content": {"application/json": {"schema": _ENVELOPE}}}
    for status, about in (("4XX", "The request was refused."), ("5XX", "It could not be served now."))
}


def json_body(kind: type[BaseModel], required: list[str], **example: Any) -> dict[str, Any]:
    """A route's `openapi_extra`: a JSON object with the fields of `kind`."""
    schema = _schema(kind) | {"required": required, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query(**types: str) -> dict[str, Any]:
    """A route's `openapi_extra`: parameters of its query, none of which is needed."""
    return {"parameters": [{"name": name, "in": "query", "schema": {"type": kind}} for name, kind in types.items()]}


@cache
def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Made once a process: it is half of the time that an application takes to make."""
    schema = kind.model_json_schema()
    inlined: dict[str, Any] = _inlined(schema, schema.pop("$defs", {}))
    return inlined


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """References lead nowhere from within a document of another kind; ours are few and not recursive."""
    match schema:
        case {"$ref": str(name)}:
            return definitions[name.rpartition("/")[2]]
        case dict():
            return {key: _inlined(value, definitions) for key, value in schema.items()}
        case list():
            return [_inlined(value, definitions) for value in schema]
    return schema
