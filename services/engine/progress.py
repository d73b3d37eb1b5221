"""What the outcomes of a step make of its sequences: tokens, choices that begin or finish, runs that end or wait for a handoff.

Called between steps. Must not know how steps are planned or computed. Invariant: every chunk's sequence moves on by what was
computed of it, or its run ends; `compute_s` is shared out by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Outcomes

from schemas.lifecycle import State
from schemas.reply import FinishReason
from services.engine.blocks import SequenceBlocks
from services.engine.drafts import next_limit
from services.engine.live import LiveRuns
from services.engine.protocol import EngineInfo, PromptOutput, RunTotals, StepReport, TokenOutput
from services.engine.runner import Drawn, Failed, Outcome, Sampled, Scored
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import TRUNK, Sequence


class Progress:
    def __init__(self, info: EngineInfo, runs: LiveRuns, blocks: SequenceBlocks) -> None:
        self._info = info
        self._runs = runs
        self._blocks = blocks

    def apply(self, step: Step, outcomes: Outcomes[Outcome] | None, seconds: float) -> StepReport:
        """`outcomes` None: what was computed is void."""
        tokens: list[TokenOutput] = []
        prompts: list[PromptOutput] = []
        drafted = accepted = 0
        prefilled: dict[int, RunTotals] = {}
        each = seconds / max(1, sum([chunk.count for chunk in step.chunks]))
        for position, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            if not self._runs.computes(sequence):
                continue  # another choice failed in this step, and with it the run
            sequence.totals.compute_s += each * chunk.count
            if sequence.cancelled:
                self._runs.leave(sequence, sequence.ending)
            elif outcomes is not None:
                outcome = outcomes[position]
                if isinstance(outcome, Scored):
                    prompts.append(PromptOutput(sequence.run, chunk.start + 1, outcome.logprobs))
                    outcome = outcome.drawn
                news = self._move_on(chunk, outcome, prefilled)
                if chunk.draft:
                    drafted, accepted = drafted + len(chunk.draft), accepted + max(0, len(news) - 1)
                tokens += news
        return StepReport(tuple(tokens), prefilled, seconds=seconds, drafted=drafted, accepted=accepted, prompts=tuple(prompts))

    def _move_on(self, chunk: Chunk, outcome: Drawn | Failed, prefilled: dict[int, RunTotals]) -> list[TokenOutput]:
        sequence = chunk.sequence
        if isinstance(outcome, Failed):
            self._runs.end(sequence.run, State.FAILED, outcome.reason, outcome.code)
            return []
        if chunk.draft:
            return self._accept(chunk, outcome or ())
        sequence.computed += chunk.count
        self._blocks.filled(sequence)
        if outcome is None and not sequence.branching:
            return []  # more of its prompt is to come
        if sequence.choice == TRUNK:
            return self._branch(sequence, outcome or (), prefilled)
        (drawn,) = outcome or ()
        output = self._append(sequence, drawn)
        self._go_on(sequence, [] if output.finish is not None else [sequence], prefilled)
        return [output]

    def _accept(self, chunk: Chunk, drawn: tuple[Sampled, ...]) -> list[TokenOutput]:
        """One token more than the draft guessed right, or those up to one that ends the choice."""
        sequence, outputs = chunk.sequence, list[TokenOutput]()
        for token in drawn:
            outputs.append(self._append(sequence, token))
            if outputs[-1].finish is not None:
                break
        sequence.computed += len(outputs)
        sequence.draft_limit = next_limit(len(chunk.draft), len(outputs) - 1)
        self._blocks.filled(sequence)
        if outputs[-1].finish is not None:
            self._runs.leave(sequence, State.FINISHED)
        return outputs

    def _branch(self, trunk: Sequence, drawn: tuple[Sampled, ...], prefilled: dict[int, RunTotals]) -> list[TokenOutput]:
        """Gives each choice that begins here its first token."""
        going = trunk.branches()
        tokens = dict(zip(trunk.drawing, drawn, strict=True))
        outputs = [self._append(each, tokens[each.choice]) for each in going if each.choice in tokens]
        ended = {output.choice for output in outputs if output.finish is not None}
        self._go_on(trunk, [each for each in going if each.choice not in ended], prefilled)
        return outputs

    def _go_on(self, sequence: Sequence, going: list[Sequence], prefilled: dict[int, RunTotals]) -> None:
        """What becomes of the run: `going` of the sequence's choices have not ended."""
        if not going:
            self._runs.leave(sequence, State.FINISHED)
        elif not sequence.then_decode:
            self._runs.hand_over(sequence.run)  # the worker holds its blocks until they are handed off
            prefilled[sequence.run] = sequence.totals
        elif sequence.branching:
            self._blocks.branch(sequence, going)
            self._runs.put(going)

    def _append(self, sequence: Sequence, drawn: Sampled) -> TokenOutput:
        sequence.ids.append(drawn.token)
        finish = sequence.finish_after_last(self._info.eos_ids, self._info.context_length)
        return TokenOutput(
            run=sequence.run,
            choice=sequence.choice,
            index=sequence.generated - 1,
            token=drawn.token,
            logprob=drawn.logprob,
            finish=FinishReason.STOP if drawn.complete else finish,
            cached_tokens=sequence.totals.cached_tokens,
            compute_s=sequence.totals.compute_s,
        )
