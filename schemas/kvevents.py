"""Numbered KV cache events of one process, and the paged snapshot that heals a gap."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from schemas.codec import Message
from schemas.numbers import Count, Whole

BlockHash = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""The identity of a full block."""


class KvEvents(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`first` is the number of this batch; the next one is `first` + 1. No hash is in both lists.

    A batch comes at least once a second, with no hashes when nothing changed.
    """

    process: str
    first: Count
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()


class KvSnapshotRequest(Message, frozen=True, omit_defaults=True, kw_only=True):
    """To `hr.kvevents.<id>.snapshot`: page `page` of everything cached. Page 0 always exists and says how many there are."""

    page: Whole = 0


class KvSnapshot(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`at` is the number of the last event batch that the page already contains; pages may differ in it.

    The union of all pages, with every batch after the smallest `at` applied in order, is the cache.
    """

    process: str
    at: Count
    page: Whole
    pages: Count
    hashes: tuple[BlockHash, ...] = ()
