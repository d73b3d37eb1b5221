"""POST /v1/chat/completions: from a body to an exchange that runs.

Everything that can be refused is refused here, before a job exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import BusUnavailable, ModelNotFound, Unavailable
from schemas.job import U64, Grammar, pack_ids
from schemas.state import ModelCard
from services.clock import Clock
from services.edge.api.answer import Answer
from services.edge.api.body import read_json
from services.edge.api.exchange import Pace, StreamedChat, WholeChat
from services.edge.api.logprobs import TokenLogprobs
from services.edge.api.measure import Measure
from services.edge.api.messages import check_messages
from services.edge.api.parameters import choices, max_tokens, refuse_unsupported, sampling
from services.edge.api.ports import Jobs, TextModel
from services.edge.api.request import ChatRequest, read_request, read_stops
from services.edge.api.response_format import read_response_format
from services.edge.jobs.draft import Draft, Limits
from services.edge.tenant import Tenant
from services.settings import EdgeSettings
from services.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Served:
    """What the endpoints work with. `started` is the process's, Unix seconds."""

    settings: EdgeSettings
    jobs: Jobs
    text: TextModel
    tenant: Tenant
    clock: Clock
    random: Random
    metrics: Metrics
    started: int


class ChatCompletions:
    def __init__(self, served: Served) -> None:
        settings = served.settings
        self._served = served
        self._pace = Pace(settings.keep_alive_s, settings.write_deadline_s)
        self._limits = Limits(settings.queue_deadline_s, settings.first_token_deadline_s, settings.total_deadline_s)

    async def __call__(self, request: Request) -> Response:
        """Raises `HeadraceError`, `ClientGone`."""
        served, settings = self._served, self._served.settings
        arrived = served.clock.monotonic()
        body = await read_json(request.scope, request.receive, limit=settings.max_body_bytes, timeout=settings.body_deadline_s)
        asked = read_request(body)
        messages = check_messages(asked.messages)
        stops = read_stops(asked.stop, settings.max_stops)
        grammar = read_response_format(asked.response_format)
        card = self._card(asked.model)
        refuse_unsupported(asked, card.capabilities)
        if grammar is not None:
            await served.text.must_compile(grammar)
        ids = await served.text.encode(messages)
        answer = self._start(asked, card, ids, stops, grammar)
        measure = Measure(served.metrics, served.clock, asked.model, arrived)
        about: tuple[Any, ...] = (
            answer,
            asked.model,
            int(served.clock.wall()),
            request.state.request_id,
            self._pace,
            measure,
        )
        if asked.stream:
            options = asked.stream_options
            return StreamedChat(*about, include_usage=bool(options and options.include_usage))
        return WholeChat(*about)

    def _card(self, model: str) -> ModelCard:
        served = self._served
        if model != served.text.name:
            raise ModelNotFound(f"The model {model[:100]!r} does not exist.", param="model")
        card = served.jobs.card(model)
        if card is None and not served.jobs.connected:
            raise BusUnavailable("The service is reconnecting.", retry_after=1.0)
        if card is None:
            raise Unavailable("No worker serves this model now.", retry_after=served.jobs.retry_after(model))
        return card

    def _start(
        self, asked: ChatRequest, card: ModelCard, ids: list[int], stops: tuple[str, ...], grammar: Grammar | None
    ) -> Answer:
        served = self._served
        limit = max_tokens(asked, len(ids), card.context_length, served.settings.default_max_tokens)
        draft = Draft(
            model=asked.model,
            prompt=pack_ids(ids),
            sampling=sampling(asked, limit, served.random.randrange(U64), served.text.vocabulary, served.text.defaults, grammar),
            limits=self._limits,
            lane=served.tenant.lane,
            salt=served.tenant.salt,
            n=choices(asked, limit, served.settings, card.kv_tokens - len(ids) if card.kv_tokens else None),
        )
        texts = [served.text.stream(stops) for _ in range(draft.n)]
        logprobs = [TokenLogprobs(served.text.spell) for _ in texts] if asked.logprobs else ()
        by_token = bool(stops or logprobs)
        return Answer(served.jobs.start(draft), texts, prompt_tokens=len(ids), token_by_token=by_token, logprobs=logprobs)
