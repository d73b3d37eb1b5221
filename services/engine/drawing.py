"""Between a step and the sampler: what each chunk draws, made on the event loop, and logits → outcomes, in the computing thread.

Knows no torch. Invariant: `outcomes` reads nothing of a sequence; what a draw refers to changes only between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.errors import InternalError
from services.engine.constraint import Constraint
from services.engine.history import History
from services.engine.runner import Failed, Outcome, Sampled
from services.engine.sampling import Draw, sample
from services.engine.scheduler import Chunk, Step
from services.engine.sequence import TRUNK
from services.engine.sequence import Sequence as EngineSequence
from services.text.grammar import BadGrammar

Draws = tuple[Draw, ...]
"""What one chunk draws from its row of logits: nothing, one token, or one for each choice that begins there."""


def draws_of(step: Step, eos_ids: frozenset[int]) -> list[Draws]:
    """For each chunk of `step`. `eos_ids` are not drawn before a choice has its `min_tokens`."""
    return [_of_chunk(chunk, eos_ids) if chunk.samples else () for chunk in step.chunks]


def outcomes(logits: NDArray[np.float32], draws: Sequence[Draws]) -> list[Outcome]:
    """One outcome a chunk. `logits` [chunks that draw, vocab] in the order of `draws`."""
    counts = [len(of_chunk) for of_chunk in draws if of_chunk]
    rows = logits if len(counts) == sum(counts) else np.repeat(logits, counts, axis=0)
    drawn = iter(sample(rows, [draw for of_chunk in draws for draw in of_chunk]))
    return [_outcome([next(drawn) for _ in of_chunk]) if of_chunk else None for of_chunk in draws]


def _of_chunk(chunk: Chunk, eos_ids: frozenset[int]) -> Draws:
    sequence = chunk.sequence
    sampling, index, history = sequence.sampling, sequence.generated, _history(sequence)
    banned = tuple(sequence.enders(eos_ids)) if index < sampling.min_tokens else ()
    return tuple(Draw(sampling, choice, index, banned, history, constraint_of(sequence)) for choice in sequence.drawing)


def _history(sequence: EngineSequence) -> History | None:
    """Kept with the sequence, and brought up to its last token."""
    if not sequence.sampling.penalises:
        return None
    if sequence.history is None:
        sequence.history = History(sequence.spec.prompt)
    sequence.history.extend(sequence.ids[sequence.prompt_length + sequence.history.length :])
    return sequence.history


def constraint_of(sequence: EngineSequence) -> Constraint | None:
    """Kept with the sequence, and brought up to its last token; each choice of several has its own."""
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


def _outcome(drawn: Iterable[Sampled | Failed]) -> Outcome:
    tokens: list[Sampled] = []
    for one in drawn:
        if isinstance(one, Failed):
            return one
        tokens.append(one)
    return tuple(tokens)
