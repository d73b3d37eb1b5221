"""What processes take of this machine's memory: the proportional set size (PSS), which counts a page once, shared out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """MB. `files`: mapped ones, weights and programs; `shared`: memory without a file, here KV pools; `own`: all else."""

    own: float
    files: float
    shared: float

    def __str__(self) -> str:
        total = self.own + self.files + self.shared
        return f"{total:,.0f} MB (own {self.own:,.0f}, files {self.files:,.0f}, shared memory {self.shared:,.0f})"


def memory_of(pids: Iterable[int]) -> Memory:
    """Of all together. A process that is gone counts nothing."""
    parts = {"Pss_Anon": 0.0, "Pss_File": 0.0, "Pss_Shmem": 0.0}
    for pid in pids:
        try:
            lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in parts:
                parts[name] += int(value.split()[0]) / 1024
    return Memory(parts["Pss_Anon"], parts["Pss_File"], parts["Pss_Shmem"])
