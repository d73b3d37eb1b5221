"""The router."""

from __future__ import annotations

from services.settings.section import Seconds, Section


class RouterSettings(Section):
    """`answer_within_s`: a submit is given up after this. `queue_poll_s`: between two looks at the queue while no job is taken.

    `drain_timeout_s`: for the placements in flight at the end.
    """

    answer_within_s: Seconds = 0.25
    queue_poll_s: Seconds = 0.1
    drain_timeout_s: Seconds = 2.0
