"""Our service layer, as `nats micro ls|info|stats|ping` and `nats req` see it: JSON in, JSON out, NATS ADR-32 on the wire.

nats-py's own is not used: it answers one request at a time and cancels running handlers when it stops. Here every request
is a task of its own, bounded, and `drain` lets running ones finish. `$SRV.*` is answered on the event loop at once: a
service that is silent for 300 ms is missing from `nats micro ls`.

Source: https://github.com/nats-io/nats-architecture-and-design/blob/main/adr/ADR-32.md
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from schemas.codec import encode_json
from schemas.errors import Disconnected, HeadraceError, InvalidRequest, Overloaded, UnreadableMessage
from services.bus.interface import Bus, Msg, Subscription
from services.bus.micro_endpoint import LONGEST_TEXT, MAX_RUNNING, NAME, QUEUE_GROUP, Endpoint, ServiceHandler, nobody
from services.clock import Clock, SystemClock
from services.telemetry.logs import fields

_VERSION = re.compile(
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?"
    r"(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$"
)
_log = logging.getLogger("headrace.micro")


class Service:
    """One service of one process; its id is the process id.

    Raises ValueError for a name or a version that would make the service invisible to the CLI.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        version: str,
        description: str,
        metadata: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        if not NAME.match(name):
            raise ValueError(f"service name {name!r}: letters, digits, - and _ only")
        if not _VERSION.match(version):
            raise ValueError(f"service version {version!r} is not a semantic version")
        self._bus = bus
        self._clock = clock or SystemClock()
        self._identity = {"name": name, "id": bus.process, "version": version, "metadata": dict(metadata or {})}
        self._description = description
        self._started = datetime.fromtimestamp(self._clock.wall(), UTC).isoformat().replace("+00:00", "Z")
        self._endpoints: list[Endpoint] = []
        self._subscriptions: list[Subscription] = []

    def endpoint(
        self,
        name: str,
        subject: str,
        handler: ServiceHandler,
        *,
        queue: str = QUEUE_GROUP,
        metadata: Mapping[str, str] | None = None,
        most: int = MAX_RUNNING,
        on_full: Callable[[HeadraceError], object] = nobody,
    ) -> None:
        """Before `start`: requests on `subject` go to `handler`, at most `most` at once; `on_full` is called with what each of
        the others is told. Raises ValueError for what the CLI could not use."""
        self._endpoints.append(Endpoint(name, subject, handler, queue, dict(metadata or {}), most, on_full))

    async def start(self) -> None:
        """Listen. Raises `Disconnected`."""
        name, process = self._identity["name"], self._identity["id"]
        for verb, answer in (("PING", self.ping), ("INFO", self.info), ("STATS", self.stats)):
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{name}", f"$SRV.{verb}.{name}.{process}"):
                self._subscriptions.append(await self._bus.subscribe(subject, self._describe(answer)))
        for endpoint in self._endpoints:
            receive = self._receive(endpoint)
            self._subscriptions.append(await self._bus.subscribe(endpoint.subject, receive, queue=endpoint.queue))

    def ping(self) -> dict[str, Any]:
        return {"type": "io.nats.micro.v1.ping_response", **self._identity}

    def info(self) -> dict[str, Any]:
        return {
            "type": "io.nats.micro.v1.info_response",
            **self._identity,
            "description": self._description,
            "endpoints": [endpoint.info() for endpoint in self._endpoints],
        }

    def stats(self) -> dict[str, Any]:
        return {
            "type": "io.nats.micro.v1.stats_response",
            **self._identity,
            "started": self._started,
            "endpoints": [endpoint.stats() for endpoint in self._endpoints],
        }

    async def drain(self, timeout: float) -> int:
        """Take no more, let running handlers finish, cancel after `timeout` seconds. How many were cancelled."""
        deadline = asyncio.get_running_loop().time() + timeout
        subscriptions, self._subscriptions = self._subscriptions, []
        await asyncio.gather(*(subscription.drain(timeout) for subscription in subscriptions))
        running = {task for endpoint in self._endpoints for task in endpoint.running}
        if not running:
            return 0
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        _, late = await asyncio.wait(running, timeout=left)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=1.0)
        return len(late)

    def _describe(self, answer: Callable[[], dict[str, Any]]) -> Callable[[Msg], None]:
        return lambda msg: self._respond(msg, encode_json(answer()))

    def _receive(self, endpoint: Endpoint) -> Callable[[Msg], None]:
        def receive(msg: Msg) -> None:
            if len(endpoint.running) >= endpoint.most:
                full = Overloaded(f"{endpoint.most} requests run already", retry_after=1.0)
                self._fail(endpoint, msg, full)
                endpoint.num_requests += 1
                endpoint.on_full(full)
                return
            task = asyncio.get_running_loop().create_task(self._serve(endpoint, msg))
            endpoint.running.add(task)
            task.add_done_callback(endpoint.running.discard)

        return receive

    async def _serve(self, endpoint: Endpoint, msg: Msg) -> None:
        began = self._clock.monotonic()
        try:
            answer = await endpoint.handler(msg)
            if answer is not None:
                self._respond(msg, answer if isinstance(answer, bytes) else encode_json(answer))
        except UnreadableMessage as error:  # what was asked
            self._fail(endpoint, msg, InvalidRequest(error.message))
        except HeadraceError as error:
            self._fail(endpoint, msg, error)
        except asyncio.CancelledError:
            self._fail(endpoint, msg, HeadraceError("the service stopped before it was done"))
            raise
        except Exception as error:
            _log.exception("an endpoint failed", extra=fields(endpoint=endpoint.name))
            self._fail(endpoint, msg, HeadraceError(f"internal error: {type(error).__name__}"))
        finally:
            endpoint.num_requests += 1
            endpoint.processing_time += int((self._clock.monotonic() - began) * 1e9)

    def _fail(self, endpoint: Endpoint, msg: Msg, error: HeadraceError) -> None:
        endpoint.failed(error)
        text, param = error.message[:LONGEST_TEXT], error.param and error.param[:LONGEST_TEXT]
        headers = {
            "Nats-Service-Error": " ".join(text.split()),
            "Nats-Service-Error-Code": str(error.status),
        }
        if error.wait is not None:
            headers["Retry-After"] = str(error.wait)
        body = {"error": {"message": text, "type": error.type, "code": error.code, "param": param}}
        self._respond(msg, encode_json(body), headers)

    def _respond(self, msg: Msg, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if not msg.reply:
            return
        try:
            self._bus.publish(msg.reply, data, headers=headers)
        except Disconnected as error:
            _log.warning("an answer could not be sent", extra=fields(subject=msg.subject, error=error))
