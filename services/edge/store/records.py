"""What goes into the database and comes out of it, free of SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.codec import SCHEMA, Message
from schemas.errors import HeadraceError, from_code
from schemas.reply import FinishReason, Logprob
from services.edge.gate.records import Entry

ROWS = range(1, SCHEMA + 2)
"""Schema versions of what lies in rows: they outlive an upgrade, either way, and messages only ever gain fields."""


class JobState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    """It ended, and its tokens were kept as long as promised."""


class Standing(StrEnum):
    """What an edge that held a job finds when it renews its lease."""

    HELD = "held"
    CANCEL = "cancel"
    """Held, and somebody wants it cancelled."""
    TAKEN = "taken"
    """Another edge holds it."""
    DELETED = "deleted"


class Data(Message, frozen=True, omit_defaults=True, kw_only=True):
    """`tokens` are u32 little-endian; `logprobs` one a token, or none at all. `finish` comes with the last ones of a choice."""

    tokens: bytes = b""
    logprobs: tuple[Logprob, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `first`, `first`+1, … of one choice."""

    choice: int
    first: int
    data: Data

    @property
    def count(self) -> int:
        return len(self.data.tokens) // 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What the next holder of a job must know.

    `attempt` is the current one, `claimed` the highest that was made, or could have been. `owned`: a run of it once was; `owner`:
    the worker that has it, "" = none. `compute_s`: of all attempts, `run_compute_s`: of it, the current one's.
    """

    attempt: int = 1
    claimed: int = 1
    deaths: int = 0
    owner: str = ""
    owned: bool = False
    weights: str = ""
    cached_tokens: int | None = None
    compute_s: float = 0.0
    run_compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """`code` and `message` are of the error of a FAILED job."""

    state: JobState
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What became of one job since the last one. `release`: the lease ends with it."""

    job: str
    facts: Facts
    chunks: tuple[Chunk, ...] = ()
    end: End | None = None
    release: bool = False


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A row. `age` is in seconds, by the database's clock."""

    job: str
    state: JobState
    request: bytes
    age: float
    edge: str
    facts: Facts
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What came of checkpoints, by job; `booked`: what was used by those that ended with them."""

    standings: Mapping[str, Standing]
    booked: Sequence[Entry] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """What a reader finds: chunks that reach to or beyond the index it has of each choice."""

    state: JobState
    chunks: tuple[Chunk, ...] = ()
    cached_tokens: int | None = None
    compute_s: float = 0.0
    error_code: str = ""
    error: str = ""

    @property
    def failure(self) -> HeadraceError | None:
        """Of a FAILED job."""
        return from_code(self.error_code, self.error) if self.state is JobState.FAILED else None


@dataclass(frozen=True, slots=True)
class Retention:
    """How long an ended job's tokens are kept, how many bytes of them all together, and how long it is remembered after."""

    keep_s: float = 600.0
    keep_bytes: int = 64 * 2**20
    remember_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class Swept:
    expired: int = 0
    forgotten: int = 0


Positions = Mapping[int, int]
"""Index of the first token that is wanted, by choice."""
