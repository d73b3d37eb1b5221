"""Numbered KV cache events of one process, and the paged snapshot that heals a gap."""

from __future__ import annotations

from schemas.codec import Message


class KvEvents(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`first` is the number of this batch; the next one is `first` + 1. Hashes are 16 bytes each; none is in both lists.

    A batch comes at least once a second, with no hashes when nothing changed.
    """

    process: str
    first: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class KvSnapshotRequest(Message, frozen=True, omit_defaults=True, kw_only=True):
    """To `hr.kvevents.<id>.snapshot`: page `page` of everything cached. Page 0 always exists and says how many there are."""

    page: int = 0


class KvSnapshot(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`at` is the number of the last event batch that the page already contains; pages may differ in it.

    The union of all pages, with every batch after the smallest `at` applied in order, is the cache.
    """

    process: str
    at: int
    page: int
    pages: int
    hashes: tuple[bytes, ...] = ()
