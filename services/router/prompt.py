"""A job's prompt as the prefix index wants it: the identities of its blocks, computed as far as somebody asks.

Owns: the chain of one job under each `kv_compat`. Must not know: who has what. Most prompts are new after a few blocks, and a
look-up stops there; so does the hashing. All of it is hashed once the job is placed, for what its worker will have, and is then
remembered for prompts that begin alike (`chains`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from schemas.job import Job, pack_ids
from services.kv.hashing import chain_root
from services.router.chains import Chains
from services.router.placement_workers import Pool
from services.router.prefix_index import PrefixIndex


class Prompt:
    """`job`'s prompt, and what its only open choice has generated: those are in one chain of blocks. `chains`: what is remembered
    of earlier ones."""

    def __init__(self, job: Job, chains: Chains | None = None) -> None:
        self._job = job
        self._remembered = Chains() if chains is None else chains
        self._chains: dict[str, _Chain] = {}

    def hits(self, index: PrefixIndex, pools: Iterable[Pool]) -> dict[str, int]:
        """By process, how many leading blocks it has. None when every token has to be computed."""
        if self._job.sampling.prompt_logprobs is not None:
            return {}
        found: dict[str, int] = {}
        for pool in pools:
            hits = index.hits(self.chain(pool.kv_compat, pool.block_tokens))
            found = found | hits if found else hits
        return found

    def chain(self, kv_compat: str, block_tokens: int) -> _Chain:
        known = self._chains.get(kv_compat)
        if known is None:
            job = self._job
            root = chain_root(kv_compat, job.salt, job.adapter)
            known = self._chains[kv_compat] = _Chain(self._remembered.names(self._packed(), block_tokens, root))
        return known

    def _packed(self) -> bytes:
        opened = self._job.open_choices
        return self._job.prompt + pack_ids(opened[0].generated) if len(opened) == 1 else self._job.prompt


class _Chain:
    """Can be walked again; what was computed stays."""

    def __init__(self, rest: Iterator[Sequence[bytes]]) -> None:
        self._known: list[bytes] = []
        self._rest = rest

    def __iter__(self) -> Iterator[bytes]:
        yield from self._known
        for names in self._rest:
            self._known += names
            yield from names
