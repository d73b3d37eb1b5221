"""What one engine step brought: tokens for the edges, stages that runs reached, ends."""

from __future__ import annotations

from schemas.lifecycle import State
from services.engine.protocol import StepReport
from services.telemetry.metrics import Metrics
from services.worker.frames import by_choice, prompt_frame
from services.worker.worker import Worker


def take_step(worker: Worker, report: StepReport) -> None:
    """Take what the engine reports after each step."""
    for scored in report.prompts:
        run = worker.runs.get(scored.run)
        if run is not None:
            worker.outbox.frame(run.job.reply_to, prompt_frame(run, scored))
    for outputs in by_choice(report.tokens):
        run = worker.runs.get(outputs[0].run)
        if run is not None:
            if run.state is State.PREFILLING and run.hop == 2:
                run.advance(State.DECODING)
            elif run.state is State.HANDING_OFF and run.hop == 2:  # the engine has fetched its KV
                worker.advance(run, State.DECODING)
            worker.frame(run, *outputs)
    for prefilled in report.prefilled:
        run = worker.runs.get(prefilled)
        if run is not None and worker.on_prefilled is not None:
            run.totals = report.prefilled[prefilled]
            worker.on_prefilled(run)
    for ended in report.ended:
        run = worker.runs.get(ended.run)
        if run is not None:
            state, reason = run.ending if ended.state is State.CANCELLED else (ended.state, ended.reason)
            worker.end(run, state, reason, ended.code)
    worker.outbox.flush()
    if worker.outbox.full:
        worker.engine.pause()  # `upkeep` resumes it
    if report.ended or report.prefilled:
        worker.beats.changed()
    _count(worker.metrics, report)


def _count(metrics: Metrics, report: StepReport) -> None:
    if report.preemptions:
        metrics.preemptions.add(report.preemptions)
    if report.seconds:
        metrics.engine_step_time.record(report.seconds)
    if report.drafted:
        metrics.draft_tokens.add(report.drafted)
        metrics.accepted_tokens.add(report.accepted)
    if report.unfetched:
        metrics.handoffs_unfetched.add(report.unfetched)
