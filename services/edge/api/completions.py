"""POST /v1/completions: raw text or token ids in, text out; several prompts in one request become several jobs.

Everything that can be refused is refused here, before a job exists. Choice k of prompt i has the index i * n + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from schemas.errors import InvalidRequest
from schemas.job import Grammar
from services.edge.api.begun import Begun
from services.edge.api.body import read_json
from services.edge.api.completion_form import CompletionForm
from services.edge.api.exchange import Pace
from services.edge.api.extras import OF_TEXT, refuse_extras
from services.edge.api.parameters import refuse_unsupported
from services.edge.api.prompt_logprobs import Echo, PromptWriter
from services.edge.api.prompts import Prompt, read_prompts
from services.edge.api.request import CompletionRequest, Stops, read_request, read_stops
from services.edge.api.response_format import read_response_format
from services.edge.api.served import Served
from services.edge.api.several import Several
from services.edge.api.start import draft, reserve, start, usual_most, write_prompt
from services.edge.jobs.draft import Draft
from services.edge.selection.asking import asking
from services.edge.selection.features import of_texts
from services.edge.selection.turns import Asking, Turn, first_to_take, planned

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


class Completions:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._pace = Pace.of(served.settings)

    async def __call__(self, request: Request) -> Response:
        """Raises `HeadraceError`."""
        served, settings = self._served, self._served.settings
        by = asking(request)
        body = await read_json(request, settings)
        by.names(served, body.get("model"))
        asked = read_request(CompletionRequest, body)
        refuse_extras(body, OF_TEXT)
        stops = read_stops(asked, settings.max_stops)
        grammar = read_response_format(asked.response_format)
        features = partial(of_texts, asked.texts or ())
        plan = planned(served, by, asked.model, features, asked.metadata, portable=asked.portable)
        begun = await first_to_take(served, by, plan, asked, partial(_begin, by, stops, grammar))
        return begun.exchange(request.state.request_id, self._pace, by.measure)


async def _begin(by: Asking, stops: Stops, grammar: Grammar | None, turn: Turn, asked: CompletionRequest) -> Begun:
    """With the model of this turn. Raises `HeadraceError`."""
    served, settings = turn.served, turn.served.settings
    prompts = read_prompts(asked.prompt, settings.max_choices, served.text.vocabulary)
    card = served.card()
    refuse_unsupported(asked, card.capabilities)
    if grammar is not None:
        await served.text.must_compile(grammar, "response_format")
    ids = [await _ids(served, prompt) for prompt in prompts]
    choices, prompt_tokens = len(ids) * (asked.n or 1), sum(len(each) for each in ids)
    most = asked.max_tokens or usual_most(by.caller, _DEFAULT_MAX_TOKENS, prompt_tokens, choices)
    made = (draft(served, by.caller, asked, card, each, most=most, grammar=grammar, param="prompt") for each in ids)
    jobs = [turn.draft(each) for each in made]
    _must_be_few(jobs, settings.max_choices)
    echoes = await _echoes(served, prompts, jobs) if asked.echo else {}
    writers = [_writer(served, asked, job, echoes.get(at * job.n, "")) for at, job in enumerate(jobs)]
    reservation = await reserve(served, by.caller, jobs, param="prompt")
    with reservation.undone_on_failure():
        answer = Several(
            [start(served, job, stops, prompt=writer) for job, writer in zip(jobs, writers, strict=True)], n=jobs[0].n
        )
        await turn.admitted(answer)
    created = int(served.clock.wall())
    form = CompletionForm(f"cmpl-{answer.id}", created, asked.model, usage=asked.usage_streamed, echoes=echoes)
    return Begun(answer, form, reservation, asked.model, bool(asked.stream))


async def _ids(served: Served, prompt: Prompt) -> Sequence[int]:
    ids = await served.text.encode_text(prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequest("'prompt' is empty.", param="prompt")
    return ids


def _must_be_few(jobs: Sequence[Draft], most: int) -> None:
    choices = sum(job.n for job in jobs)
    if choices > most:
        text = f"{len(jobs)} prompts with {jobs[0].n} choices each are more than the {most} choices of one request."
        raise InvalidRequest(text, param="prompt")


async def _echoes(served: Served, prompts: Sequence[Prompt], jobs: Sequence[Draft]) -> dict[int, str]:
    """By choice: the prompt's text."""
    echoes: dict[int, str] = {}
    for position, (prompt, job) in enumerate(zip(prompts, jobs, strict=True)):
        text = prompt if isinstance(prompt, str) else await served.text.decode_any(prompt)
        echoes |= {position * job.n + choice: text for choice in range(job.n)}
    return echoes


def _writer(served: Served, asked: CompletionRequest, job: Draft, text: str) -> PromptWriter | None:
    """What writes how likely the prompt is; None when nobody asked."""
    if job.sampling.prompt_logprobs is None:
        return None
    echo = Echo(text, asked.logprobs) if asked.echo and asked.logprobs is not None else None
    return write_prompt(served, job, asked.prompt_logprobs, echo)
