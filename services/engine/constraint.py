"""One choice's place in its grammar: which tokens may come next, and whether its text is complete.

Owns a matcher. Must not know: logits, runs, who compiled the grammar. Invariant: the place depends on the generated ids only, so
a choice that resumes on another worker, or after a handoff, is where one is that never stopped.
The event loop hands it ids between steps; all else happens in the thread that computes the step.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.text.grammar import CompiledGrammar


class ConstraintBroken(Exception):
    """The ids so far are none the grammar takes, or it became too costly to follow."""


class Constraint:
    """`length`: how many generated tokens it was told of or took. A new one costs little; catching up about 1 µs a token."""

    __slots__ = ("_matcher", "_untold", "length")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._matcher = grammar.matcher()
        self._untold: list[int] = []
        self.length = 0

    def extend(self, generated: Iterable[int]) -> None:
        """The next generated ids: those of earlier attempts, or of another worker."""
        before = len(self._untold)
        self._untold.extend(generated)
        self.length += len(self._untold) - before

    def allowed(self, vocab: int) -> NDArray[np.bool_]:
        """[vocab]: whether each id may come next; end of sequence where the text may end. At least one may.

        Raises `ConstraintBroken`.
        """
        self._catch_up()
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ConstraintBroken("the grammar does not continue these tokens")
        return np.unpackbits(np.frombuffer(mask, np.uint8), count=vocab, bitorder="little").view(np.bool_)

    def take(self, token: int) -> bool:
        """Go on with an allowed id. True when the text is complete: nothing may follow."""
        self._catch_up()
        self._matcher.consume_token(token)
        self.length += 1
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _catch_up(self) -> None:
        if self._untold:
            self._matcher.consume_tokens(self._untold)
            self._untold.clear()
