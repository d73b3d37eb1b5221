"""One job while the edge answers for it: its current attempt, and who owns it. What it brings is in `tokens`.

Owns: adoption, ownership, the order of states. Knows no bus and no timers. Invariants: of one attempt only the first run counts;
the owner's hop only grows; `attempt` only grows; after `closed` the consumer gets nothing more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import HeadraceError
from schemas.explanation import Explanation
from schemas.lifecycle import TRANSITIONS, State, advance
from schemas.reply import Event, Frame
from services.edge.jobs.draft import Draft
from services.edge.jobs.mailbox import Fanout, Mailbox
from services.edge.jobs.peers import Word
from services.edge.jobs.tokens import JobTokens


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt ended without finishing the job. `kind` is one of a fixed set (a metric label); `error` is what the client
    hears if there is no next attempt; `final`: there is none. `alive`: its run may still compute."""

    kind: str
    error: HeadraceError
    final: bool = False
    alive: bool = False


def _always() -> bool:
    return True


class ActiveJob:
    """`run` 0 = none adopted. `hop` 0 = nobody owns it. `processes` maps a hop to the process there, as far as it is known.

    `detached`: it has no consumer here, only readers that come and go (`readers`), and outlives this edge.
    """

    def __init__(
        self, job: str, draft: Draft, edge: str, reply_to: str, stamp: float, *, detached: bool = False, attempt: int = 1
    ) -> None:
        self.id = job
        self.draft = draft
        self.detached = detached
        self.tokens = JobTokens(draft)
        self.readers: set[Mailbox] = set()
        self.mailbox = Fanout(self.readers) if detached else Mailbox()
        self.joining = 0
        """Not 0: another edge began it, and made this attempt at least; who has it now is being asked."""
        self.held: Callable[[], bool] = _always
        """Whether the job is ours now: a detached one may be another edge's without our having heard of it."""
        self.given_up = False
        """Another edge holds it, or may; nothing of it is our business any more."""
        self.admitted = False
        self.answered = False
        """A router's answer came, or nobody waits for one any more."""
        self.explanation: Explanation | None = None
        """What its caller is told of why."""
        self.closed = False
        self.error: HeadraceError | None = None
        self.owned = False
        self.submitted = False
        self.weights = ""
        self.deaths = 0
        self.cached_tokens: int | None = None
        """Of the first attempt that said anything: what the prompt found, not what a resume found of its own earlier attempt."""
        self._computed_before = self._computed = 0.0
        """Seconds of compute of earlier attempts, and of this one so far."""
        self.attempt = attempt - 1
        self._claimed = 0
        self.word = Word("", 0.0, 0)
        """The last one about the adopted run, whoever said it."""
        self.owned_at = 0.0
        """When its present owner was heard of first (monotonic seconds)."""
        self.edge = edge
        self.reply_to = reply_to
        self.stamp = stamp
        self.next_attempt()

    # attempts

    def next_attempt(self) -> None:
        self.attempt = self.claimed_attempt + 1
        self._computed_before, self._computed = self.compute_s, 0.0
        self.state = State.SUBMITTED
        self.run = 0
        self.hop = 0
        self.processes: dict[int, str] = {}
        self.queued_at = math.inf
        """When the queue took it (the event loop's time)."""
        self.over: asyncio.Future[AttemptEnd | None] = asyncio.get_running_loop().create_future()
        self.tokens.next_attempt()

    def inherit(self, earlier_s: float, run_s: float) -> None:
        """What earlier edges heard of its compute: of attempts that had ended, and of the one that had not."""
        self._computed_before, self._computed = earlier_s, run_s

    def rejoin(self, attempt: int, *, known: bool) -> None:
        """Somebody still has this attempt, of which we had not heard; later ones are counted from where we were.

        `known`: earlier edges had heard of it, and of its compute.
        """
        self._claimed, self.attempt = self.claimed_attempt, attempt
        if not known:
            self._computed_before, self._computed = self.compute_s, 0.0

    @property
    def claimed_attempt(self) -> int:
        """The highest one that was ever made, or could have been."""
        return max(self.attempt, self._claimed)

    def end_attempt(self, end: AttemptEnd | None) -> None:
        """None: every choice has finished. The first end counts."""
        if not self.over.done():
            self.over.set_result(end)
            self.mailbox.wake()

    def await_confirmation(self) -> None:
        """The attempt is over for us, but its run may still compute: from now on `over` is the end of that."""
        if self.over.done():
            self.over = asyncio.get_running_loop().create_future()

    # what workers say

    def adopts(self, attempt: int, run: int) -> bool:
        """Whether a message of this run counts; the first run of the current attempt is adopted."""
        if attempt != self.attempt:
            return False
        if self.run == 0 and run and not self.over.done():
            self.run = run
        return self.run == run

    def own(self, hop: int, word: Word) -> None:
        """The process that said `word` speaks for the run at `hop`."""
        self.processes[hop] = word.process
        self.owned_at = word.at
        if hop > self.hop:
            self.hop = hop
            self.owned = self.admitted = True

    def take(self, frame: Frame) -> bool:
        """Tokens, or what was said of the prompt. False when something before this frame is missing."""
        if self.cached_tokens is None:
            self.cached_tokens = frame.cached_tokens
        if frame.compute_s > self._computed:
            self._computed = frame.compute_s
        return self.tokens.take(frame)

    def reach(self, event: Event) -> None:
        """Take the state of `event` if it lies ahead."""
        if event.weights and not self.weights:
            self.weights = event.weights
        if event.state in TRANSITIONS[self.state]:
            self.state = advance(self.state, event.state)

    @property
    def owner(self) -> str:
        return self.processes.get(self.hop, "")

    @property
    def in_charge(self) -> str:
        """The owner; before *owned*, the process that accepted."""
        return self.owner or (self.processes[min(self.processes)] if self.processes else "")

    @property
    def cancel_targets(self) -> list[str]:
        """Who may compute the adopted run: its owner; in a handoff both; before *owned* whom the router named."""
        if self.hop and self.state is not State.HANDING_OFF:
            return [self.owner]
        return sorted(set(self.processes.values()))

    @property
    def replay_targets(self) -> list[str]:
        """Who has what may be missing: the owner; while the prompt is, whoever computes or computed it."""
        return [self.owner] if self.tokens.prompt.complete else sorted(set(self.processes.values()))

    def age(self, wall: float) -> float:
        """Seconds since it was made, at Unix time `wall`."""
        return wall - self.stamp

    @property
    def queue_deadline(self) -> float:
        """Unix seconds."""
        return self.stamp + self.draft.limits.queue_s

    @property
    def waits(self) -> bool:
        """In the queue, as far as is known here."""
        return self.state is State.QUEUED and not self.run and not self.closed and not self.over.done()

    @property
    def may_compute(self) -> bool:
        """Somebody may have this attempt and not have ended it."""
        if not self.over.done():
            return self.submitted
        end = self.over.result()
        return end is not None and end.alive

    # what it cost

    @property
    def compute_s(self) -> float:
        """Of all attempts, as far as workers have said."""
        return self._computed_before + self._computed

    @property
    def run_compute_s(self) -> float:
        """Of it, the current attempt's."""
        return self._computed
