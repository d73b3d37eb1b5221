"""How to reach NATS, and what is kept there."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from services.settings.section import Seconds, Section, resolvable


class NatsSettings(Section):
    """How to reach NATS. Each process connects as its role's user.

    `url`: one server, or all of a cluster with commas between them. `replicas`: servers that keep each stream and bucket, no more
    than the cluster has. `account`: the server account that our processes log in to, when it imports the system account's
    DISCONNECT advisory (infra/nats/permissions.conf); "" = routers do without.
    """

    url: str = "nats://127.0.0.1:4222"
    user: str = ""
    password: str = ""
    prefix: str = Field("hr", pattern=r"^[a-z][a-z0-9_]*$")
    connect_timeout_s: Seconds = 10.0
    replicas: int = Field(1, ge=1, le=5)
    account: str = Field("", pattern=r"^[A-Za-z0-9_-]*$")

    @field_validator("url")
    @classmethod
    def _names_servers(cls, url: str) -> str:
        servers = [server for server in url.split(",") if server.strip()]
        parts = [urlsplit(server if "://" in server else f"nats://{server.strip()}") for server in servers]  # raises ValueError
        if not parts or not all(resolvable(part.hostname or "") and part.port != 0 for part in parts):
            raise ValueError("no server is named")
        return url

    @property
    def servers(self) -> list[str]:
        """Each server's URL."""
        return [server.strip() for server in self.url.split(",") if server.strip()]
