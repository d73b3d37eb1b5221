"""Seeds that once failed, each with what it found. They run first, and stay when the 500 move on.

Each is told with the kinds of trouble there were when it was found, so that a new kind leaves its story alone. Any other change
of `plan` gives every seed another story: then look for new ones on the old code, or turn the bug into a plain test.
"""

from __future__ import annotations

FIRST_KINDS = ("kill", "pause", "partition", "disconnect", "nats_down", "queue_down", "break_transfers", "drain", "storm")

SECOND_KINDS = (*FIRST_KINDS, "choices")

THIRD_KINDS = (*SECOND_KINDS, "advice", "builds", "stall")

PINNED: dict[tuple[int, tuple[str, ...]], str] = {
    (
        58,
        FIRST_KINDS,
    ): "the *owned* of decode was lost, so the end that its digests told was nobody's: the job waited for its deadline",
    (
        69,
        FIRST_KINDS,
    ): "decode was disconnected for 12 s; back again it did not know the run any more, and its digests said so in vain",
    (96, FIRST_KINDS): "a worker that left had ended its runs, but that message was lost: a clean exit started no other attempt",
    (97, FIRST_KINDS): "the last tokens came after the attempt had ended as RETRY: a job that was complete was submitted again",
    (114, FIRST_KINDS): "as 96, of a decode worker that drained",
    (136, FIRST_KINDS): "in bad weather alone: the RETRY of an owner was lost, and no digest was asked for it",
    (153, FIRST_KINDS): "decode was cut off for 4 s with nothing proven: nobody gave up a silent owner",
    (166, FIRST_KINDS): "decode stood still for 10 s: as 153",
    (167, FIRST_KINDS): "as 97",
    (
        1738,
        FIRST_KINDS,
    ): "a submit was delivered twice: the second answer sent a job that was owned into the queue, which was down",
    (193, FIRST_KINDS): "as 58, while prefill was paused",
    (
        1523,
        THIRD_KINDS,
    ): "the engine of the only prefill worker stood still: resumes went back to it, although a worker of both was well",
    (22599, SECOND_KINDS): "decode's *owned* came after the news of its death: the job was a dead process's",
}
