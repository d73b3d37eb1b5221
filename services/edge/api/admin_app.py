"""What operators' programs ask over HTTP, on a port of its own: metrics, and whether the edge lives and may get work.

It needs no key, so nothing of a request or a tenant's content is to be had here; who may reach it is decided by where it listens.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.responses import Response

from schemas.errors import BusUnavailable, Unavailable
from services.edge.api.envelope import add_envelope
from services.edge.api.gate import Traffic
from services.edge.api.head import Head
from services.edge.api.served import Served

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_admin_app(served: Served, traffic: Traffic) -> FastAPI:
    app = FastAPI(title="Headrace edge, for operators", openapi_url=None, redirect_slashes=False)
    app.add_middleware(Head)
    add_envelope(app)
    add_probes(app, served, traffic)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.prometheus_text(), media_type=_PROMETHEUS)

    return app


def add_probes(app: FastAPI, served: Served, traffic: Traffic) -> None:
    """Liveness and readiness, as Kubernetes and load balancers ask for them."""

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(model: str | None = None) -> Response:
        """Whether some model can be served, or a certain one."""
        if traffic.draining:
            raise Unavailable("The server takes no new requests now.", retry_after=1.0)
        if not served.jobs.connected:
            raise BusUnavailable("The service is reconnecting.", retry_after=1.0)
        if not (served.alive if model is None else model in served.alive):
            raise Unavailable("No worker serves the model now.", retry_after=1.0)
        return JSONResponse({"status": "ready"})
