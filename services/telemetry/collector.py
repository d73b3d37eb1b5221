"""Python's cyclic garbage collector in a process that serves: what start-up left is not looked at again.

A full collection visits every object there is and holds up the event loop meanwhile: 200 ms with what an edge loads at its start,
more with open streams. It comes whenever there is a quarter more, so as load grows. Invariant: what was there when a process
began to serve is never visited again, and never freed by the collector; counts of references free it as ever.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects made and not freed before the youngest are looked at. Records of a token die long before."""


def keep_collections_short() -> None:
    """Call it once, when all is loaded, and only in a process that does nothing else. Takes one full collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
