"""What every application of an edge answers when it refuses: OpenAI's envelope, also where the framework refuses by itself."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from schemas.errors import HeadraceError
from services.edge.api.errors import error_response, from_status
from services.edge.api.measure import Measure

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def add_envelope(app: Starlette) -> None:
    app.add_exception_handler(HeadraceError, _refused)
    app.add_exception_handler(HTTPException, _framework_refused)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    return _response(request, error)


async def _framework_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _response(request, from_status(error.status_code, request.method, request.url.path))
    response.headers.update(error.headers or {})
    if "allow" in response.headers:
        response.headers["allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """The methods of all routes of this path: the framework tells those of the first one."""
    routes = request.app.routes
    taken = [
        name for name in _METHODS if any(each.matches({**request.scope, "method": name})[0] is Match.FULL for each in routes)
    ]
    return [*taken, "HEAD"] if "GET" in taken else taken


def _response(request: Request, error: HeadraceError) -> Response:
    measure: Measure | None = request.scope.get("state", {}).get("measure")  # the operators' own port has none
    if measure is not None:
        measure.failed(error)
    return error_response(error)
