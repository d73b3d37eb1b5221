"""Every delay of a job's life at the edge, in seconds. Values and reasons: the design, sections 3 and 4."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """`submit_s`: a router answers within it. `repeat_s`: cancels and replays. `stalled_s`: replays that bring nothing.

    `owned_s`: from *accepted* to the first word of a worker. `cancel_s`: a cancel that nobody confirms is given up.
    `cut_off_s`: without a connection for so long, nobody waits for it any more (workers drop what they computed for us).
    `rejoin_s`, `rejoin_tries`: how long, and how often, the owner of an adopted job is asked for before it is given up.
    `settle_s`: bus timers stand still for so long after a reconnect. `pace_s`: between two submits of a resumed job.
    `reconnect_s`: so long new jobs wait for another server when ours is gone.
    `queue_s`: so long a queue may be out of reach before jobs are refused for it (nats-server elects a leader in 4 to 9 s);
    `queue_pace_s`: between two submits of a job that meanwhile no queue could keep.
    """

    submit_s: float = 0.3
    repeat_s: float = 0.1
    stalled_s: float = 0.5
    owned_s: float = 3.0
    cancel_s: float = 10.0
    cut_off_s: float = 10.0
    settle_s: float = 3.0
    rejoin_s: float = 0.5
    rejoin_tries: int = 4
    pace_s: tuple[float, float] = (0.05, 0.2)
    reconnect_s: float = 2.0
    queue_s: float = 10.0
    queue_pace_s: tuple[float, float] = (0.25, 0.75)
    beat_s: float = 0.5
    router_alive_s: float = 1.0
    card_alive_s: float = 3.0
    fresh_attempts: int = 4
    """Attempts of a job that nobody has owned yet."""
    deaths: int = 3
    """Proven deaths of its owners after which a job is refused."""
