"""HEAD: what GET answers, without its body, which the HTTP server leaves out. Load balancers and `curl -I` ask so."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Head:
    """Around an application whose routes know no HEAD: nothing behind it sees one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
