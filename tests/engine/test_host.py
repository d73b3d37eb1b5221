"""What a machine and the control groups around a process leave to it, on file systems that the tests write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.engine.host import available_cores, available_memory

GB = 2**30
UNLIMITED_V1 = "9223372036854771712"
UNIFIED, SPLIT = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GB free, and no control groups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 * GB // 1024} kB\nMemAvailable: {8 * GB // 1024} kB\nHugePages_Total: 0\n")
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def limit(root: Path, folder: str, most: object, used: int, idle_files: int = 0) -> None:
    v1 = folder.startswith(SPLIT)
    write(root, f"{folder}/{'memory.limit_in_bytes' if v1 else 'memory.max'}", most)
    write(root, f"{folder}/{'memory.usage_in_bytes' if v1 else 'memory.current'}", used)
    write(root, f"{folder}/memory.stat", f"anon 5\n{'total_inactive_file' if v1 else 'inactive_file'} {idle_files}\nfile 7")


def test_a_machine_without_limits(root: Path) -> None:
    assert available_memory(root) == 8 * GB


@pytest.mark.parametrize(("group", "base"), [("0::", UNIFIED), ("4:memory:", SPLIT)], ids=["v2", "v1"])
class TestMemory:
    def test_a_container_that_sees_its_own_group_as_the_root(self, root: Path, group: str, base: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/")
        limit(root, base, 2 * GB, GB // 2)
        assert available_memory(root) == 1.5 * GB

    def test_a_path_that_the_container_does_not_see(self, root: Path, group: str, base: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/kubepods/pod7/abc")
        limit(root, base, 2 * GB, GB // 2)
        assert available_memory(root) == 1.5 * GB

    def test_the_narrowest_of_the_groups_around_counts(self, root: Path, group: str, base: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/user/job")
        limit(root, f"{base}/user/job", 6 * GB, GB)
        limit(root, f"{base}/user", 4 * GB, 3 * GB)
        assert available_memory(root) == GB

    def test_files_nobody_reads_are_free(self, root: Path, group: str, base: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/")
        limit(root, base, 2 * GB, 2 * GB, idle_files=GB)
        assert available_memory(root) == GB

    @pytest.mark.parametrize("most", ["max", UNLIMITED_V1])
    def test_no_limit(self, root: Path, group: str, base: str, most: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/")
        limit(root, base, most, GB)
        assert available_memory(root) == 8 * GB

    def test_more_used_than_allowed_leaves_nothing(self, root: Path, group: str, base: str) -> None:
        write(root, "proc/self/cgroup", f"{group}/")
        limit(root, base, GB, 2 * GB)
        assert available_memory(root) == 0


def test_both_versions_at_once(root: Path) -> None:
    write(root, "proc/self/cgroup", "4:cpu,memory:/job\n1:name=systemd:/\n0::/other")
    limit(root, "sys/fs/cgroup/memory/job", 3 * GB, GB)
    write(root, "sys/fs/cgroup/unified/cgroup.procs", "")
    assert available_memory(root) == 2 * GB


def test_this_machine_has_memory_and_cores() -> None:
    assert available_memory() > 0
    assert set(available_cores()) <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/a", {"a/cpu.max": "200000 100000"}, 2),
        ("0::/a", {"a/cpu.max": "max 100000", "cpu.max": "350000 100000"}, 3),
        ("0::/a", {"a/cpu.max": "50000 100000"}, 1),
        ("0::/a", {"a/cpu.max": "max 100000"}, 8),
        ("0::/a", {}, 8),
        ("2:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 4),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
        ("2:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "6400000", "cpu/a/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_cores_that_the_quota_pays_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4, 12)))
    write(root, "proc/self/cgroup", group)
    for path, text in files.items():
        write(root, f"sys/fs/cgroup/{path}", text)
    assert available_cores(root) == tuple(range(4, 4 + cores))
