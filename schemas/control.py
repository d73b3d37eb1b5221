"""What an edge says to the owner of a run (`hr.ctl.<id>`), and to all routers (`hr.cancel`)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from schemas.checks import is_subject, require, require_process
from schemas.codec import Message
from schemas.numbers import ChoiceIndex, Count, Random64, Seconds


class Verb(StrEnum):
    CANCEL = "cancel"
    REPLAY = "replay"
    ATTACH = "attach"


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """From token `index` of `choice` on."""

    choice: ChoiceIndex
    index: Count


class Control(Message, frozen=True, omit_defaults=True, kw_only=True):
    """cancel: `choices` (None = all); `by_operator`: the run's last event says so, and no edge resumes the job. replay, attach:
    `positions`. attach: also `reply_to` and `edge`.

    An attach with `reply_to` sends the run's records there from now on; without it, its edge says that it still holds the job.
    On `hr.job.<job>` the asker need not know the run: 0. The owner answers with a `Digest` of that one run.
    """

    run: Random64
    job: str
    verb: Verb
    choices: tuple[ChoiceIndex, ...] | None = None
    positions: tuple[Position, ...] = ()
    reply_to: str = ""
    edge: str = ""
    by_operator: bool = False

    def __post_init__(self) -> None:
        require(not self.reply_to or is_subject(self.reply_to), "reply_to is not a subject")
        if self.edge:
            require_process(self.edge, "edge")


class CancelJob(Message, frozen=True, omit_defaults=True, kw_only=True):
    """Edge to all routers: purge the job's queue subject, remember it until its queue deadline (`remember_s` from now)."""

    job: str
    attempt: Count
    model: str
    tier: str
    lane: Count
    remember_s: Seconds

    def __post_init__(self) -> None:
        require(self.remember_s <= 86_400.0, "remember_s is above 86400")


class CancelAck(Message, frozen=True, omit_defaults=True, kw_only=True):
    """One router's answer."""

    router: str
    job: str
    purged: bool = False
