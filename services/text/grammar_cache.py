"""Compiles grammars beside the event loop, each within a time budget, and remembers what came of the last ones.

Must not know what a grammar is for. Invariant: the loop never waits for a compilation; one grammar is compiled once, however many
ask for it meanwhile; what is remembered is bounded by the size of its sources.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from schemas.job import Grammar
from services.text.grammar import BadGrammar, CompiledGrammar, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Compiled = CompiledGrammar | BadGrammar
BUDGET_S = 5.0
_THREADS = 2
_REMEMBERED = 2**20
"""Characters of source, and `_ENTRY` more for each: about 100 MB of the costliest grammars."""
_ENTRY = 4096


class GrammarCache:
    """`compile_` is what a thread runs; it raises nothing."""

    def __init__(
        self,
        vocabulary: LLTokenizer,
        *,
        budget_s: float = BUDGET_S,
        compile_: Callable[[Grammar, LLTokenizer], Compiled] = compile_grammar,
    ) -> None:
        self._vocabulary = vocabulary
        self._compile_now = compile_
        self._budget_s = budget_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, tuple[asyncio.Task[Compiled], int]] = OrderedDict()
        self._weight = 0

    def start(self, grammar: Grammar) -> asyncio.Future[Compiled]:
        """What comes of `grammar`; the same one again while it is remembered. It never fails and must not be cancelled."""
        key = hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode(errors="surrogatepass"), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key][0]
        task = asyncio.get_running_loop().create_task(self._compile(key, grammar), name="grammar")
        weight = _ENTRY + len(grammar.source)
        self._known[key] = (task, weight)
        self._weight += weight
        while self._weight > _REMEMBERED and len(self._known) > 1:
            self._forget(next(iter(self._known)))
        return task

    async def get(self, grammar: Grammar) -> Compiled:
        """Waits for it, at most the budget."""
        return await asyncio.shield(self.start(grammar))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, key: bytes, grammar: Grammar) -> Compiled:
        try:
            async with asyncio.timeout(self._budget_s):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._compile_now, grammar, self._vocabulary)
        except TimeoutError:
            self._forget(key)  # it may have waited for others
            return BadGrammar("it takes too long to compile")

    def _forget(self, key: bytes) -> None:
        entry = self._known.pop(key, None)
        self._weight -= entry[1] if entry is not None else 0
