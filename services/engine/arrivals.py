"""How a run that arrives becomes the sequences that compute it: what it must be, its blocks, its grammar.

Must not know steps, nor which runs are here. Invariant: what is refused leaves its run's blocks as they were.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from schemas.errors import InvalidRequest
from schemas.handoff import FirstToken
from services.clock import Clock
from services.engine.admission import admit
from services.engine.blocks import SequenceBlocks
from services.engine.protocol import EngineInfo, RunSpec
from services.engine.sequence import Sequence
from services.text.grammar_cache import Compiled, GrammarCache


class Arrivals:
    """`on_compiled` is called when a grammar that is being compiled is ready."""

    def __init__(
        self,
        info: EngineInfo,
        blocks: SequenceBlocks,
        grammars: GrammarCache | None,
        clock: Clock,
        on_compiled: Callable[[], object],
    ) -> None:
        self._info = info
        self._blocks = blocks
        self._grammars = grammars
        self._clock = clock
        self._on_compiled = on_compiled
        self._numbers = itertools.count()

    def prefill(self, spec: RunSpec, *, then_decode: bool) -> list[Sequence]:
        """Its prompt is computed here. Raises as `PrefillEngine.prefill` does."""
        admit(self._info, spec)
        sequence = Sequence.begin(spec, next(self._numbers), then_decode, self._clock.monotonic())
        self._blocks.admit(sequence)
        sequence.grammar = self._compiling(spec)
        return [sequence]

    def decode(self, spec: RunSpec, first: tuple[FirstToken, ...], *, cached_tokens: int, compute_s: float) -> list[Sequence]:
        """Its prompt was computed elsewhere. Raises as `DecodeEngine.decode` does."""
        admit(self._info, spec, first)
        sequence = Sequence.begin(spec, next(self._numbers), True, self._clock.monotonic())
        sequence.totals.cached_tokens, sequence.totals.compute_s = cached_tokens, compute_s
        self._blocks.adopt(sequence)
        sequence.grammar = self._compiling(spec)
        going = sequence.with_first(first)
        if not going:
            raise InvalidRequest("no choice goes on")
        if sequence.branching:
            self._blocks.branch(sequence, going)
        return going

    def close(self) -> None:
        """Nothing is compiled any more."""
        if self._grammars is not None:
            self._grammars.close()

    def _compiling(self, spec: RunSpec) -> asyncio.Future[Compiled] | None:
        """The run's grammar, compiled while its prompt is computed."""
        if spec.sampling.grammar is None or self._grammars is None:
            return None
        compiling = self._grammars.start(spec.sampling.grammar)
        compiling.add_done_callback(lambda _: self._on_compiled())
        return compiling
