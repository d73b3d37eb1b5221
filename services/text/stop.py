"""Stop strings: text is held back for as long as it may still become one.

Owns the undecided tail of one choice's text. Invariant: what is emitted is the whole text cut before (or, if it is kept, after)
the stop string that is complete first (of several complete at the same character, the longest), however the text was split over
calls.

One Knuth-Morris-Pratt automaton a stop string: a step a character, whatever the strings' length, so that long or repetitive
stop strings cannot slow the edge down. Source: Knuth, Morris, Pratt, "Fast pattern matching in strings", 1977.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """`kept`: the one that was found stays in the text. Raises ValueError for an empty stop string: it would match everywhere."""

    __slots__ = ("_automata", "_held", "_kept", "_openings", "stopped")

    def __init__(self, stops: Sequence[str], *, kept: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self._automata = [_Automaton(stop) for stop in stops]
        self._openings = frozenset(stop[0] for stop in stops)
        self._held = ""
        self._kept = kept
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now sure, and whether a stop string was found. After that every call gives ("", True)."""
        if self.stopped:
            return "", True
        if not self._held and self._openings.isdisjoint(text):
            return text, False
        pending = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            if complete := self._step(character):
                self.stopped = True
                self._held = ""
                return pending[: position if self._kept else position - complete], True
        undecided = max(automaton.matched for automaton in self._automata)
        sure = len(pending) - undecided
        self._held = pending[sure:]
        return pending[:sure], False

    @property
    def held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def finish(self) -> str:
        """The text still held back: no more will come, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> int:
        """The length of the longest stop string that ends with `character`, 0 if none does."""
        return max([len(each.pattern) for each in self._automata if each.step(character)], default=0)


class _Automaton:
    """How much of `pattern` the text seen so far ends with."""

    __slots__ = ("_fallback", "matched", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * len(pattern)
        for position in range(1, len(pattern)):
            self._advance(pattern[position])
            self._fallback[position] = self.matched
        self.matched = 0

    def step(self, character: str) -> bool:
        """Whether the text now ends with the whole pattern. Not to be called again after that."""
        self._advance(character)
        return self.matched == len(self.pattern)

    def _advance(self, character: str) -> None:
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == character:
            self.matched += 1
