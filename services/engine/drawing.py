"""Between a step and the sampler: what each chunk draws, made on the event loop, and logits → outcomes, in the computing thread.

Knows no torch. Invariant: `outcomes` reads nothing of a sequence; what a draw refers to changes between steps, and by it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InternalError
from services.engine.constraint import Constraint
from services.engine.history import History
from services.engine.logprobs import score
from services.engine.runner import Drawn, Failed, Outcome, Sampled, Scored
from services.engine.sampling import Draw, sample
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import TRUNK
from services.engine.sequence import Sequence as EngineSequence
from services.text.grammar import BadGrammar


@dataclass(frozen=True, slots=True)
class Draws:
    """What one chunk's rows of logits are for. The first ones say how likely the tokens of the prompt in `scored` are, beside
    `alternatives` others. From what is left nothing is drawn, one token, one for each choice that begins there, or, of a draft,
    one from each row as long as the draft is right."""

    draws: tuple[Draw, ...] = ()
    draft: tuple[int, ...] = ()
    scored: tuple[int, ...] = ()
    alternatives: int = 0

    @property
    def rows(self) -> int:
        return len(self.scored) + len(self.draft) + bool(self.draws)


def draws_of(step: Step, eos_ids: frozenset[int]) -> list[Draws]:
    """For each chunk of `step`. `eos_ids` are not drawn before a choice has its `min_tokens`."""
    return [_of_chunk(chunk, eos_ids) for chunk in step.chunks]


def outcomes(logits: NDArray[np.float32], draws: Sequence[Draws]) -> list[Outcome]:
    """One outcome a chunk. `logits` [rows of all chunks, vocab] in the order of `draws`."""
    ends = accumulate(of_chunk.rows for of_chunk in draws)
    return [_outcome(logits[end - of_chunk.rows : end], of_chunk) for end, of_chunk in zip(ends, draws, strict=True)]


def accept(draft: Sequence[int], draw: Callable[[int], Sampled | Failed]) -> Drawn | Failed:
    """The tokens of a draft's rows: `draw(row)` for one after the other, up to the first that is not what the draft said.

    A draw that fails does so only as the first one; else it is left to the next step, where it comes first.
    """
    tokens: list[Sampled] = []
    for row in range(len(draft) + 1):
        drawn = draw(row)
        if isinstance(drawn, Failed):
            return tuple(tokens) or drawn
        tokens.append(drawn)
        if drawn.complete or row == len(draft) or drawn.token != draft[row]:
            break
    return tuple(tokens)


def _of_chunk(chunk: Chunk, eos_ids: frozenset[int]) -> Draws:
    sequence, scored = chunk.sequence, scored_ids(chunk)
    alternatives = sequence.sampling.prompt_logprobs or 0
    if not chunk.samples:
        return Draws(scored=scored, alternatives=alternatives)
    history = _history(sequence)

    def draw(choice: int, index: int, constraint: Constraint | None) -> Draw:
        banned = tuple(sequence.enders(eos_ids)) if index < sequence.sampling.min_tokens else ()
        return Draw(sequence.sampling, choice, index, banned, history, constraint)

    first = sequence.generated
    if chunk.draft:
        moved = constraint_of(sequence)  # by each draw, for the next one
        return Draws(tuple(draw(sequence.choice, first + row, moved) for row in range(len(chunk.draft) + 1)), chunk.draft)
    return Draws(tuple(draw(choice, first, constraint_of(sequence)) for choice in sequence.drawing), (), scored, alternatives)


def _history(sequence: EngineSequence) -> History | None:
    """Kept with the sequence, and brought up to its last token."""
    if not sequence.sampling.penalises:
        return None
    if sequence.history is None:
        sequence.history = History(sequence.spec.prompt)
    sequence.history.extend(sequence.ids[sequence.prompt_length + sequence.history.length :])
    return sequence.history


def constraint_of(sequence: EngineSequence) -> Constraint | None:
    """Kept with the sequence, and brought up to its last token.

    Where several choices begin it is a new one each time: a draw moves it, and each choice has its own.
    """
    if sequence.grammar is None:
        return None
    compiled = sequence.grammar.result()
    if isinstance(compiled, BadGrammar):
        raise InternalError("a run whose grammar is refused is in a step")
    constraint = sequence.constraint or Constraint(compiled)
    if sequence.choice != TRUNK:
        sequence.constraint = constraint
    constraint.extend(sequence.ids[sequence.prompt_length + constraint.length :])
    return constraint


def scored_ids(chunk: Chunk) -> tuple[int, ...]:
    """The tokens of the prompt that follow the chunk's scored rows."""
    return tuple(chunk.sequence.ids[chunk.start + 1 : chunk.start + 1 + chunk.scored])


def _outcome(rows: NDArray[np.float32], draws: Draws) -> Outcome:
    count = len(draws.scored)
    if count == 0:
        return _drawn(rows, draws)
    logprobs = score(rows[:count], draws.scored, draws.alternatives)
    drawn = _drawn(rows[count:], draws)
    if isinstance(logprobs, Failed):
        return logprobs
    return drawn if isinstance(drawn, Failed) else Scored(logprobs, drawn)


def _drawn(rows: NDArray[np.float32], draws: Draws) -> Drawn | Failed:
    if not draws.draws:
        return None
    if draws.draft:
        return accept(draws.draft, lambda row: _after_draft(rows, draws, row))
    tokens: list[Sampled] = []
    for one in sample(np.broadcast_to(rows, (len(draws.draws), rows.shape[1])), draws.draws):
        if isinstance(one, Failed):
            return one
        tokens.append(one)
    return tuple(tokens)


def _after_draft(rows: NDArray[np.float32], draws: Draws, row: int) -> Sampled | Failed:
    """Drawn from the row that comes after `row` tokens of the draft, which were right."""
    draw = draws.draws[row]
    if row and draw.history is not None:
        draw.history.extend(draws.draft[row - 1 : row])
    return sample(rows[row : row + 1], [draw])[0]
