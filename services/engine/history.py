"""The ids a choice has seen so far, and how often it generated each: what penalties are computed from.

Must not know: logits, sequences. Invariant: it depends on the prompt and on the generated ids only, never on where an attempt or
a handoff cut them, so a resumed choice has the history of one that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class History:
    """`length`: how many generated tokens are counted. Adding one costs O(1); reading copies nothing."""

    __slots__ = ("_counts", "_ids", "_places", "length")

    def __init__(self, prompt: Iterable[int]) -> None:
        known = dict.fromkeys(prompt)
        self._places = {token: place for place, token in enumerate(known)}
        self._ids = np.array(list(known), np.int64)
        self._counts = np.zeros(len(known), np.float32)
        self.length = 0

    def extend(self, generated: Iterable[int]) -> None:
        """Count the next generated tokens."""
        for token in generated:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(place + 16, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(place + 16, np.float32)))
            self._ids[place] = token
            self._counts[place] += 1
            self.length += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Every id of prompt and generated tokens once, in order of first appearance."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` was generated: 0 for what only the prompt holds."""
        return self._counts[: len(self._places)]
