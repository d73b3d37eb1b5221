"""The HTTP edge: where it listens, what it bounds, what it keeps and charges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from services.settings.section import LARGEST, LONGEST_S, Host, Seconds, Section, no_flag

Price = Annotated[float, BeforeValidator(no_flag), Field(ge=0, allow_inf_nan=False)]


class EdgeSettings(Section):
    """The HTTP edge. `max_body_bytes` bounds a request before it is parsed.

    `admin_host`, `admin_port`: where metrics and probes are answered, without a key; 0 = a free port, told in the log.
    `max_connections` are open at once; on each, headers have to be whole within `header_deadline_s`, counted from the end of the
    request before: longer than the 60 s for which proxies commonly keep a connection that they may use again.
    `open_on_loopback`: callers on this machine need no API key.
    `database_url` "" = a SQLite file in the home folder. `detached_jobs`: how many one edge holds at once; `detached_keep_s` and
    `detached_keep_mb`: how long, and how much all together, of those that ended is kept. `responses_keep_days`: how long stored
    responses are; `usage_keep_days`: how long the rows of the usage ledger, and what was spent of each day's and month's budgets.
    `queue_deadline_s`, `first_token_deadline_s`, `total_deadline_s`: of a request, from its beginning. `submit_timeout_s`: for a
    router's answer. `body_deadline_s`: for a request's body. `keep_alive_s`: between signs of life of a stream that waits.
    `write_deadline_s`: for a client that takes nothing of its answer. `drain_timeout_s`: for open answers, after SIGTERM.
    `default_max_tokens`: of a request that says none; unset = to the context's end. `max_stops`: stop strings of a request.
    `max_choices` bounds a request's `n`; `max_generated_tokens` what all its choices together may generate, if it has several;
    `max_prompt_logprobs` log-probabilities of one prompt, alternatives included;
    `price_per_compute_s`: what a second of compute costs, in any currency; unset = `usage` has no cost.
    `model_prices`: the same by model, where it differs.
    `max_nats_requests` how many requests that came over NATS run at once.
    """

    host: Host = "127.0.0.1"
    open_on_loopback: bool = True
    port: int = Field(8000, ge=0, le=65535)
    admin_host: Host = "127.0.0.1"
    admin_port: int = Field(0, ge=0, le=65535)
    max_connections: int = Field(16_384, gt=0, le=LARGEST)
    header_deadline_s: Seconds = 75.0
    max_body_bytes: int = Field(4 * 2**20, gt=0, le=LARGEST)
    max_stops: int = Field(16, ge=4, le=LARGEST)
    submit_timeout_s: Seconds = 0.3
    queue_deadline_s: Seconds = 30.0
    first_token_deadline_s: Seconds = 120.0
    total_deadline_s: Seconds = 600.0
    body_deadline_s: Seconds = 30.0
    keep_alive_s: Seconds = 10.0
    write_deadline_s: Seconds = 30.0
    default_max_tokens: int | None = Field(None, gt=0, le=LARGEST)
    max_choices: int = Field(16, ge=1, le=128)
    max_generated_tokens: int = Field(2**17, gt=0, le=LARGEST)
    max_prompt_logprobs: int = Field(2**17, gt=0, le=LARGEST)
    max_nats_requests: int = Field(256, gt=0, le=LARGEST)
    price_per_compute_s: Price | None = None
    model_prices: Mapping[str, Price] = Field(default_factory=dict)
    drain_timeout_s: Seconds = 30.0
    database_url: str = ""
    detached_jobs: int = Field(1024, ge=0, le=LARGEST)
    detached_keep_s: Seconds = 600.0
    detached_keep_mb: int = Field(64, gt=0, le=LARGEST)
    responses_keep_days: Seconds = 30.0
    usage_keep_days: float = Field(400.0, ge=40, le=LONGEST_S)

    @model_validator(mode="after")
    def _two_ports(self) -> EdgeSettings:
        """The server takes a port that is in use: callers would be answered by either."""
        if self.port and self.port == self.admin_port:
            raise ValueError(f"admin_port: {self.port} is edge.port already")
        return self

    def price(self, model: str) -> float | None:
        """Of a second of compute; None = not set."""
        return self.model_prices.get(model, self.price_per_compute_s)
