"""Seeds that once failed, each with what it found. They run first, and stay when the 500 move on.

A change of `plan` gives every seed another story: then look for new ones on the old code, or turn the bug into a plain test.
"""

from __future__ import annotations

PINNED: dict[int, str] = {
    58: "the *owned* of decode was lost, so the end that its digests told was nobody's: the job waited for its deadline",
    69: "decode was disconnected for 12 s; back again it did not know the run any more, and its digests said so in vain",
    96: "a worker that left had ended its runs, but that message was lost: a clean exit started no other attempt",
    97: "the last tokens came after the attempt had ended as RETRY: a job that was complete was submitted again",
    114: "as 96, of a decode worker that drained",
    136: "in bad weather alone: the RETRY of an owner was lost, and no digest was asked for it",
    153: "decode was cut off for 4 s with nothing proven: nobody gave up a silent owner",
    166: "decode stood still for 10 s: as 153",
    167: "as 97",
    1738: "a submit was delivered twice: the second answer sent a job that was owned into the queue, which was down",
    193: "as 58, while prefill was paused",
}
