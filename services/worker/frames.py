"""What an engine reports of a run, as records for its edge. Pure functions; for most tokens each of these is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas.reply import PROMPT, Frame
from services.engine.protocol import PromptOutput, TokenOutput
from services.worker.runs import Run


def by_choice(outputs: Sequence[TokenOutput]) -> Iterator[Sequence[TokenOutput]]:
    """Of one step: those that follow each other in one choice together."""
    start = 0
    for end in range(1, len(outputs) + 1):
        first = outputs[start]
        if end == len(outputs) or outputs[end].run != first.run or outputs[end].choice != first.choice:
            yield outputs[start:end]
            start = end


def token_frame(run: Run, outputs: Sequence[TokenOutput]) -> Frame:
    """The next tokens of one choice, one at least."""
    last = outputs[-1]
    return Frame(
        run=run.id,
        job=run.job.job,
        attempt=run.job.attempt,
        hop=run.hop,
        choice=last.choice,
        index=outputs[0].index,
        tokens=tuple([output.token for output in outputs]),
        logprobs=tuple([output.logprob for output in outputs if output.logprob is not None]),
        finish=last.finish,
        cached_tokens=last.cached_tokens,
        compute_s=last.compute_s,
    )


def prompt_frame(run: Run, output: PromptOutput) -> Frame:
    """How likely the next tokens of the prompt are."""
    return Frame(
        run=run.id,
        job=run.job.job,
        attempt=run.job.attempt,
        hop=run.hop,
        choice=PROMPT,
        index=output.index,
        tokens=tuple(logprob.token for logprob in output.logprobs),
        logprobs=output.logprobs,
    )
