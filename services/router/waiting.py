"""How many jobs wait for credit: what this router counted in the queue, what it just sent there, what other routers say.

Knows no bus. Invariant: a JetStream that is slow or down never holds new work back: a count older than 1 s counts as zero, and
while nothing can be pulled (a consumer without a leader, in a queue that counts) who waits there has nobody behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from schemas.admin import HeldJob
from schemas.job import LANES, Job, Tier
from schemas.lifecycle import State
from schemas.state import QueueReport
from schemas.subjects import Subjects, name_token
from services.clock import Clock
from services.router.lanes import rank

_TIERS = frozenset(Tier)
_LANES = frozenset(map(str, range(LANES)))
FRESH_S = 1.0
EXPECT_S = 0.25
"""How long a job that was answered *queue* may take to appear there."""

Lanes = dict[str, dict[int, int]]
"""tier -> lane -> jobs."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a job's subject says."""

    model: str
    tier: str
    lane: int

    @classmethod
    def of(cls, subject: str) -> _Place | None:
        match subject.split("."):
            case [_, _, model, tier, lane, _] if tier in _TIERS and lane in _LANES:
                return cls(model, tier, int(lane))
        return None  # nobody would ever pull it, so nobody waits for it


@dataclass(frozen=True, slots=True)
class _Expected:
    """A job that was told to queue; it counts until `until`."""

    place: _Place
    until: float


class Waiting:
    """Counts by model, tier and lane."""

    def __init__(self, router: str, subjects: Subjects, clock: Clock) -> None:
        self._router = router
        self._subjects = subjects
        self._clock = clock
        self._counted: dict[str, int] = {}
        self._sums: Counter[_Place] = Counter()
        self._counted_at = float("-inf")
        self._expected: dict[str, _Expected] = {}
        self._left: dict[str, float] = {}
        self._others: dict[tuple[str, str], tuple[Mapping[str, int], float]] = {}
        self._stuck: set[str] = set()

    # what is heard

    def counted(self, counts: Mapping[str, int], since: float) -> None:
        """The queue's own numbers by subject, asked for at `since`: what left it after that may still be in them."""
        self._left = {subject: at for subject, at in self._left.items() if at >= since}
        self._expected = {subject: job for subject, job in self._expected.items() if subject not in counts}
        self._counted = {subject: jobs for subject, jobs in counts.items() if subject not in self._left}
        self._counted_at = since
        self._sums = Counter()
        for subject, jobs in self._counted.items():
            if place := _Place.of(subject):
                self._sums[place] += jobs

    def expect(self, job: Job) -> None:
        """The edge was told to queue `job`; it counts from now, so that who comes next waits behind it."""
        place = _Place(name_token(job.model), job.tier, job.lane)
        self._expected[self.subject(job)] = _Expected(place, self._clock.monotonic() + EXPECT_S)

    def left(self, subject: str) -> None:
        """The job was taken out of the queue."""
        self._left[subject] = self._clock.monotonic()
        self._expected.pop(subject, None)
        jobs, place = self._counted.pop(subject, 0), _Place.of(subject)
        if place:
            self._sums[place] -= jobs

    def heard(self, report: QueueReport) -> None:
        """What a router says; our own word does not count."""
        if report.router != self._router:
            self._others[report.router, report.model] = (report.waiting, self._clock.monotonic())

    def pulled(self, model: str, works: bool) -> None:
        """Whether the last pull of this router was answered."""
        (self._stuck.discard if works else self._stuck.add)(model)

    # what is asked

    def models(self) -> set[str]:
        """Subject tokens of the models for which jobs wait."""
        return {place.model for place, jobs in self._known().items() if jobs > 0}

    def lanes(self, model: str) -> Lanes:
        """Jobs of `model` that this router knows to wait, by tier and lane."""
        token, found = name_token(model), Lanes()
        for place, jobs in self._known().items():
            if place.model == token and jobs > 0:
                found.setdefault(place.tier, {})[place.lane] = jobs
        return found

    def ahead(self, model: str) -> Lanes:
        """Those of them that new work has to wait for."""
        return Lanes() if self.stuck(model) else self.lanes(model)

    def stuck(self, model: str) -> bool:
        """Until another pull is answered."""
        return model in self._stuck

    def jobs(self) -> Iterator[HeldJob]:
        """Those that were counted in the queue; model names as they are in subjects."""
        for subject in self._counted:
            if place := _Place.of(subject):
                job = subject.rpartition(".")[2]
                yield HeldJob(job=job, state=State.QUEUED, model=place.model, tier=Tier(place.tier), lane=place.lane)

    def by_tier(self, model: str) -> dict[str, int]:
        """`lanes` by tier, for the report."""
        return {tier: sum(lanes.values()) for tier, lanes in self.lanes(model).items()}

    def ahead_of(self, model: str, tier: str) -> bool:
        """True when a job of `tier` or a higher one waits that can be pulled, as far as any router knows."""
        if self.stuck(model):
            return False
        oldest = self._clock.monotonic() - FRESH_S
        counts: list[Mapping[str, int]] = [self.by_tier(model)]
        counts += [waiting for (_, of), (waiting, at) in self._others.items() if of == model and at > oldest]
        return any(jobs > 0 and rank(other) <= rank(tier) for waiting in counts for other, jobs in waiting.items())

    def expecting(self, model: str) -> bool:
        """True while a job that was told to queue has not been seen there."""
        return any(place.model == name_token(model) for place in self._expected_places())

    def routers(self, model: str) -> int:
        """How many place what waits for `model`, ourselves included."""
        oldest = self._clock.monotonic() - FRESH_S
        return 1 + sum(of == model and at > oldest for (_, of), (_, at) in self._others.items())

    def subject(self, job: Job) -> str:
        """Where `job` waits."""
        return self._subjects.job(job.model, job.tier, job.lane, job.job)

    def forget_old(self) -> None:
        """Bounds memory; call it now and then."""
        now = self._clock.monotonic()
        self._others = {key: (waiting, at) for key, (waiting, at) in self._others.items() if at > now - FRESH_S}
        self._expected = {subject: job for subject, job in self._expected.items() if job.until > now}

    def _known(self) -> Counter[_Place]:
        fresh = self._counted_at > self._clock.monotonic() - FRESH_S
        return (self._sums if fresh else Counter[_Place]()) + Counter(self._expected_places())

    def _expected_places(self) -> list[_Place]:
        now = self._clock.monotonic()
        return [job.place for job in self._expected.values() if job.until > now]
