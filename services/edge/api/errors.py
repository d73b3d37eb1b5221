"""Errors as callers see them: OpenAI's envelope, on every path.

Source: the OpenAI API reference, "Error codes"; openai-python reads `error.message`, `type`, `param`, `code` as strings or null.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import Response

from schemas.errors import HeadraceError, InternalError, InvalidRequest, MethodNotAllowed, NotFound
from services.edge.api.written import encode


class BadRequest(InvalidRequest):
    """A body that is not what the endpoint reads."""

    code = "invalid_request_body"


def internal_error(request_id: str) -> InternalError:
    """The fixed text of every failure of ours; the details are in the log under this id."""
    return InternalError(f"Internal error. Please report request id {request_id}.")


def envelope(error: HeadraceError) -> bytes:
    """One JSON object without line breaks."""
    content = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return encode({"error": content})


def error_response(error: HeadraceError) -> Response:
    headers = {}
    if error.wait is not None:
        headers["retry-after"] = str(error.wait)
    if error.status == HTTPStatus.TOO_MANY_REQUESTS and not error.retryable:
        headers["x-should-retry"] = "false"  # the official SDKs would try again otherwise
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Response(envelope(error), error.status, headers, "application/json")


def from_status(status: int, method: str, path: str) -> HeadraceError:
    """What the framework's own refusals become: unknown paths, wrong methods."""
    if status == HTTPStatus.NOT_FOUND:
        return NotFound(f"Unknown URL: {method} {path}")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return MethodNotAllowed(f"{method} is not allowed on {path}.")
    return BadRequest("The request cannot be read.") if status < 500 else InternalError("Internal error.")
