"""What computes a step for the step loop: an engine's own part, behind one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from schemas.reply import Logprob
from services.engine.scheduler import Step


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One token drawn for a chunk that samples. `complete`: its grammar takes nothing after it, so the choice ends."""

    token: int
    logprob: Logprob | None = None
    complete: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """This chunk's run cannot go on; its batch mates can. `code`: an error of `schemas.errors`, when it is not ours."""

    reason: str
    code: str = ""


Drawn = tuple[Sampled, ...] | None
"""What was drawn of one chunk; None where it does not sample.

Of one choice its next tokens in order, one and as many more as its draft guessed right; of several that begin, one for each in
its sequence's `drawing`.
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """Of a chunk with `scored` rows: how likely the prompt's tokens after each were, `logprobs` [scored], and what was drawn."""

    logprobs: tuple[Logprob, ...]
    drawn: Drawn = None


Outcome = Drawn | Scored | Failed
"""What came of one chunk."""


class Runner(Protocol):
    """Computes one step. Blocks the event loop never; releases the GIL or awaits while it computes."""

    async def execute(self, step: Step) -> Sequence[Outcome] | None:
        """One outcome a chunk of `step`, in order. None: every row was cancelled, what was computed is void.

        An exception fails every run of the step.
        """

    async def close(self) -> None:
        """Returns when no step is being computed any more: from then on nobody touches a block."""
