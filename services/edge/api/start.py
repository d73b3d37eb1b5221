"""From what was asked and the prompt's ids to a job that runs: the last step before an answer, the same for every endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.job import U64, Grammar, pack_ids, unpack_ids
from schemas.state import ModelCard
from services.edge.api.answer import Answer
from services.edge.api.apart import Apart, take_apart
from services.edge.api.calls import CallTracker
from services.edge.api.logprobs import TokenLogprobs
from services.edge.api.parameters import choices, max_tokens, must_be_scorable, sampling
from services.edge.api.ports import Handle
from services.edge.api.prompt_logprobs import Echo, PromptWriter
from services.edge.api.request import NO_STOPS, GenerationRequest, Stops
from services.edge.api.served import Served
from services.edge.api.tools import Tools
from services.edge.gate.meter import Reservation
from services.edge.gate.records import Caller
from services.edge.jobs.draft import Draft, Limits


def draft(
    served: Served,
    caller: Caller,
    asked: GenerationRequest,
    card: ModelCard,
    ids: Sequence[int],
    *,
    most: int | None,
    grammar: Grammar | None = None,
    param: str = "messages",
) -> Draft:
    """`most`: tokens to generate at most, None = the request does not say; `param`: the field that the prompt came from.

    Raises `InvalidRequest`.
    """
    settings = served.settings
    most = most or usual_most(caller, settings.default_max_tokens, len(ids), asked.n or 1)
    must_be_scorable(asked, len(ids), settings.max_prompt_logprobs)
    limit = max_tokens(most, len(ids), card.context_length, param=param)
    return Draft(
        model=asked.model,
        prompt=pack_ids(ids),
        sampling=sampling(asked, limit, served.random.randrange(U64), served.text.vocabulary, served.text.defaults, grammar),
        limits=Limits(settings.queue_deadline_s, settings.first_token_deadline_s, settings.total_deadline_s),
        lane=caller.tenant.lane,
        salt=caller.tenant.salt,
        tier=caller.tier,
        explain=caller.explain,
        n=choices(asked, limit, settings, _room(card, len(ids))),
    )


def usual_most(caller: Caller, usual: int | None, prompt_tokens: int, choices: int) -> int | None:
    """Tokens of each choice, where the request does not say: `usual`, and no more than can ever fit into the caller's limits."""
    longest = caller.longest_answer(prompt_tokens)
    fits = None if longest is None else max(1, longest // choices)
    return min((most for most in (usual, fits) if most is not None), default=None)


def _room(card: ModelCard, prompt_tokens: int) -> int | None:
    """Tokens that the choices of one run may have together; None: not known, or each is a run of its own."""
    return card.kv_tokens - prompt_tokens if card.kv_tokens and card.capabilities.n else None


async def reserve(served: Served, caller: Caller, jobs: Sequence[Draft], *, param: str = "messages") -> Reservation:
    """Of the caller's limits, what the jobs of one request may use. Raises as `Meter.admit`."""
    prompt, output = sum(job.prompt_tokens for job in jobs), sum(job.n * job.sampling.max_tokens for job in jobs)
    return await served.meter.admit(caller, prompt, output, param=param)


def start(
    served: Served,
    job: Draft,
    stops: Stops = NO_STOPS,
    tools: Tools | None = None,
    prompt: PromptWriter | None = None,
    handle: Handle | None = None,
) -> Answer:
    """The job begins now, unless it has, as `handle`; its answer has to be read, or cancelled.

    `tools`: what calls are looked for in it. `prompt`: unless all that the job asks of its prompt is written in vLLM's form.
    """
    alternatives = job.sampling.prompt_logprobs
    if prompt is None and alternatives is not None:
        prompt = write_prompt(served, job, alternatives)
    texts = [served.text.stream(stops.strings, keep_stop=stops.kept) for _ in range(job.n)]
    logprobs = [TokenLogprobs(served.text.spell) for _ in texts] if job.sampling.logprobs is not None else ()
    by_token = bool(stops.strings or logprobs or (tools and not tools.several))
    handle = handle or _begin(served, job)
    return Answer(
        handle,
        texts,
        prompt_tokens=job.prompt_tokens,
        token_by_token=by_token,
        logprobs=logprobs,
        calls=_calls(served, job, tools, handle.id) if tools else (),
        prompt=prompt,
        price=served.settings.price(job.model),
    )


def _calls(served: Served, job: Draft, tools: Tools, name: str) -> list[CallTracker]:
    make = served.text.tool_format.parser
    return [CallTracker(make(tools.names), tools, f"call_{name[:20]}_{choice}_") for choice in range(job.n)]


def _begin(served: Served, job: Draft) -> Handle:
    """A job for all choices, or for each, as the model's engines have it."""
    card = served.jobs.card(job.model)
    if job.n == 1 or card is None or card.capabilities.n:
        return served.jobs.start(job)
    return Apart([served.jobs.start(each) for each in take_apart(job)])


def write_prompt(served: Served, job: Draft, table: int | None, echo: Echo | None = None) -> PromptWriter:
    """Of the job's prompt."""
    return PromptWriter(unpack_ids(job.prompt), served.text.spell, served.text.stream, table, echo)
