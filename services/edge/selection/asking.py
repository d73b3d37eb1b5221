"""Who asks over HTTP, and where the headers go that tell of the choice: `Gate` adds them to the answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from services.edge.selection.features import HINT_HEADER
from services.edge.selection.turns import Asking


def asking(request: Request) -> Asking:
    """Behind the gate, which lets callers in and measures."""

    def tell(headers: dict[str, str]) -> None:
        request.state.told = headers

    return Asking(request.state.caller, tell, request.state.measure, request.headers.get(HINT_HEADER))


def told(scope: Scope) -> list[tuple[bytes, bytes]]:
    """What was told of this request, as headers of its answer."""
    return [(name.encode(), value.encode()) for name, value in scope["state"].get("told", {}).items()]
