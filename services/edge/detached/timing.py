"""Every delay of a detached job, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DetachedTiming:
    """`lease_s`, the scan and an attach together must stay below what a worker waits (30 s) less `attach_s`: so a job whose edge
    dies is adopted while its run still goes on.

    `checkpoint_s`: tokens and leases are written. `attach_s`: owners hear that their job is held. `watch_s`: leases are looked
    at. `adopt_s`: lapsed rows are looked for. `poll_s`: a reader at another edge than the job's looks at the row. `cut_off_s`:
    without NATS for so long, an edge leaves its jobs to others. `sweep_s`: what ended long ago is let go.
    """

    lease_s: float = 15.0
    checkpoint_s: float = 1.0
    attach_s: float = 10.0
    watch_s: float = 0.25
    adopt_s: float = 1.0
    poll_s: float = 0.5
    cut_off_s: float = 10.0
    sweep_s: float = 10.0
