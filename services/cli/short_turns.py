"""Asks Linux for short turns of this thread, the one of the event loop: it then gets a core when it wakes, not at the next tick.

Beside engines every core computes. The scheduler lets a thread compute until its turn (`slice`) is over, and looks once a tick,
which may be 4 ms; only who asks for shorter turns is let in before. It gets no larger share of the cores by that. Threads and
processes that this one starts get the usual turns. Linux 6.12 and later; elsewhere nothing changes.
"""

from __future__ import annotations

import ctypes
import os
import platform

TURN_NS = 300_000
"""The kernel takes 0.1 to 100 ms; its own turns are 1.4 ms on 2 cores, 2.8 ms from 8 cores on."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The system call's number: C libraries before glibc 2.41 have no function for it."""
_RESET_ON_FORK = 0x01


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, version 0."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def take_short_turns() -> bool:
    """Whether the system took it, as Linux before 6.12 does without effect. A thread of another policy is left as it is."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, TURN_NS, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0) == 0)
