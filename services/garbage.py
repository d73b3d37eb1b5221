"""Python's garbage collector in a process that serves for long: what was loaded at its start is not walked again and again."""

from __future__ import annotations

import gc

YOUNG = 20_000
"""Objects made, and not freed since, at which the young ones are walked: more than the requests of one moment are made of."""


def settle() -> None:
    """To be called when a service is ready. Whatever lives now is taken to live for ever; what comes later is collected as ever.

    A full collection of an edge walks 140,000 objects, which takes 76 ms in which no stream gets a token.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
