"""What this machine leaves to this process, or what the container does that it runs in: memory and cores.

Reads /proc and the control groups, version 2 and 1; knows nothing of what either is for. Invariant: of all limits that hold for
this process the narrowest is reported.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class _Names:
    """What one version of control groups calls things."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that can be had without pushing anything out that is in use. Files that nobody read of late count as free."""
    left = [_machine(root)]
    for folder in _groups(root, "memory"):
        for names in (_V2, _V1):
            limit, used = _number(folder / names.limit), _number(folder / names.used)
            if limit is not None and used is not None:
                left.append(limit - used + _fields(folder / "memory.stat").get(names.reclaimable, 0))
    return max(0, min(left))


def available_cores(root: Path = _ROOT) -> tuple[int, ...]:
    """The numbers of the cores this process may run on, as many as its quota pays for; at least one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quotas = [quota for folder in _groups(root, "cpu") if (quota := _quota(folder)) is not None]
    return tuple(cores[: max(1, min([len(cores), *(int(quota) for quota in quotas)]))])


def has_gpu_driver(root: Path = _ROOT) -> bool:
    """Whether NVIDIA's driver is here (Linux, or Windows' subsystem for it): only then torch is loaded to look for a GPU."""
    return any((root / path).exists() for path in ("dev/nvidiactl", "dev/dxg"))


def _machine(root: Path) -> int:
    available = _fields(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and those around it. A container sees few of them."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base = mount / "unified" if (mount / "unified").is_dir() else mount
        elif controller in controllers.split(","):
            base = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):
            yield base / folder


def _quota(folder: Path) -> float | None:
    """Cores' worth of time; None without a limit."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    limited = quota.strip().isdigit() and period.strip().isdigit()
    return int(quota) / int(period) if limited else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    """Empty when there is no such file: then it limits nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
