"""One filled-in instance of every message, so that a test can go through all of them."""

from __future__ import annotations

from schemas.codec import Message, SchemaRange
from schemas.control import CancelAck, CancelJob, Control, Position, Verb
from schemas.explanation import Candidate, Explanation, PassedOver, Terms
from schemas.handoff import BlockRef, FirstToken, Handoff, Offer, OfferRequest, Ticket
from schemas.job import Choice, Deadlines, Grammar, Job, Sampling, Tier, pack_ids
from schemas.kvevents import KvEvents, KvSnapshot, KvSnapshotRequest
from schemas.lifecycle import State
from schemas.placement import (
    Accept,
    Accepted,
    CachedBlocks,
    Lease,
    LeaseAnswer,
    LeaseItem,
    LeaseResult,
    LeaseVerb,
    Placement,
    Queue,
    Refuse,
    Refused,
)
from schemas.reply import Digest, DigestEntry, Event, FinishReason, Frame, Frames, Logprob
from schemas.state import (
    Capabilities,
    Cause,
    Credits,
    Death,
    EdgeBeat,
    ModelCard,
    QueueReport,
    Rates,
    Role,
    WorkerState,
)

SECOND = SchemaRange(oldest=1, newest=2)
RUN, JOB = 2**64 - 1, "0123456789abcdef" * 2
EDGE, WORKER = "e1-mx235xkkixxjc", "d1-mx235xkkixxjd"
CREDITS = Credits(version=9, prefill_tokens=512, decode_slots=3, kv_blocks=77)
LOGPROB = Logprob(token=5, logprob=-0.25, top=((5, -0.25), (6, -1.5)))
EXPLANATION = Explanation(
    router="r1",
    outcome="refused",
    reason="full",
    retry_after=2.0,
    prefill=WORKER,
    decode=WORKER,
    why=Terms(uncached=9, ttft_s=0.5, wait_s=0.25, load=0.5, kv=0.25),
    candidates=(Candidate(process=WORKER, does="decode", cached=16, cost=0.5),),
    passed_over=(PassedOver(process=WORKER, why="no_credit"),),
    left_out=1,
)
TICKET = Ticket(address="127.0.0.1:4000", token=b"t" * 24, expires_s=5.0)


def job() -> Job:
    return Job(
        job=JOB,
        attempt=2,
        model="m.1",
        prompt=pack_ids([1, 2, 2**32 - 1]),
        sampling=Sampling(
            seed=2**64 - 1,
            max_tokens=8,
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={7: -100.0},
            stop_token_ids=(2,),
            ignore_eos=True,
            logprobs=5,
            prompt_logprobs=1,
            grammar=Grammar(kind="regex", source="a+"),
        ),
        deadlines=Deadlines(stamp=1.7e9, total=600.0, queue=30.0, first_token=60.0),
        reply_to=f"hr.reply.{EDGE}",
        edge=EDGE,
        n=2,
        choices=(Choice(index=0, generated=(4, 5), done=True), Choice(index=1, generated=(6,))),
        tier=Tier.FREE,
        lane=15,
        salt=b"s" * 32,
        adapter="lora",
        detached=True,
        resume=True,
        deaths=1,
        weights="w",
        explain=True,
        trace={"traceparent": "00-1-2-01"},
    )


def every() -> list[Message]:
    """Every kind of whole payload."""
    frame = Frame(
        run=RUN,
        job=JOB,
        attempt=1,
        hop=2,
        index=3,
        choice=1,
        tokens=(5,),
        logprobs=(LOGPROB,),
        finish=FinishReason.LENGTH,
        cached_tokens=16,
        compute_s=0.5,
    )
    event = Event(
        run=RUN,
        job=JOB,
        attempt=1,
        hop=2,
        state=State.RETRY,
        reason="preempted",
        error_code="job_failed",
        retry_after=1.5,
        weights="w",
    )
    state = WorkerState(
        process=WORKER,
        role=Role.DECODE,
        model="m",
        kv_compat="k",
        weights="w",
        schemas=SchemaRange(),
        capabilities=Capabilities(seed=True, grammar=("regex",)),
        credits=CREDITS,
        sent=1.7e9,
        context_length=8192,
        block_tokens=16,
        queued=1,
        running=2,
        backlog=700,
        yielding=400,
        yielding_queued=1,
        swapped=1,
        kv_used=3,
        swap_used=2,
        kv_total=4,
        steps=5,
        step_p99_s=0.06,
        rates=Rates(prefill_tokens_s=300.0, decode_step_s=0.03, fetch_tokens_s=9e4),
        draining=True,
        stalled=True,
        host="h",
    )
    card = ModelCard(model="m", capabilities=Capabilities(n=True), context_length=8192, kv_tokens=65536, weights=("w",))
    return [
        job(),
        Frames(process=WORKER, frames=(frame,), events=(event,)),
        Digest(
            process=WORKER,
            runs=(DigestEntry(run=RUN, job=JOB, attempt=1, hop=2, state=State.DECODING, last=((0, 3),)),),
            stalled=True,
            continued=True,
        ),
        Control(
            run=RUN,
            job=JOB,
            verb=Verb.REPLAY,
            choices=(1,),
            positions=(Position(choice=1, index=4),),
            reply_to="r",
            edge=EDGE,
            by_operator=True,
        ),
        CancelJob(job=JOB, attempt=1, model="m", tier="paid", lane=3, remember_s=30.0),
        CancelAck(router="r1", job=JOB, purged=True),
        Accepted(run=RUN, prefill=WORKER, decode=WORKER, router="r1", explanation=EXPLANATION),
        Queue(router="r1", reason="others_wait", explanation=EXPLANATION),
        Refused(code="no_capacity", reason="full", retry_after=2.0, explanation=EXPLANATION),
        Placement(run=RUN, job=job(), decode=WORKER, fetch=CachedBlocks(process=WORKER, blocks=3)),
        Accept(run=RUN, credits=CREDITS),
        Refuse(run=RUN, reason="no_blocks", credits=CREDITS, retry_after=1.0),
        Lease(process="p", items=(LeaseItem(run=RUN, verb=LeaseVerb.RESERVE, blocks=3, suspect=JOB),)),
        LeaseAnswer(results=(LeaseResult(run=RUN, ok=False, reason="no_slot"),), credits=CREDITS),
        Handoff(
            run=RUN,
            job=job(),
            prefill=WORKER,
            first=(FirstToken(choice=0, index=2, token=9, logprob=LOGPROB),),
            kv_compat="k",
            blocks=(BlockRef(slot=1, generation=2, hash=b"h" * 16),),
            tail_tokens=3,
            ticket=TICKET,
            cached_tokens=16,
            compute_s=0.25,
            opaque=b"o",
        ),
        OfferRequest(run=RUN, kv_compat="k", hashes=(b"h" * 16,), have=1),
        Offer(run=RUN, blocks=(BlockRef(slot=1, generation=2),), ticket=TICKET, reason="not_cached"),
        state,
        EdgeBeat(process=EDGE, sent=1.7e9, schemas=SECOND, writes=2, left=True),
        QueueReport(router="r1", model="m", waiting={"paid": 3}, drain_rate=2.5, schemas=SECOND, card=card),
        Death(process=WORKER, cause=Cause.KILLED),
        KvEvents(process=WORKER, first=3, stored=(b"h" * 16,), removed=(b"g" * 16,)),
        KvSnapshotRequest(page=2),
        KvSnapshot(process=WORKER, at=3, page=0, pages=1, hashes=(b"h" * 16,)),
    ]
