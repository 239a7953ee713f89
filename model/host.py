"""What this process may use of its machine: processors and memory, as affinity and cgroups allow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """Processors that this process can keep busy: its affinity, cut to the cgroup's quota; at least 1."""
    count = float(len(os.sched_getaffinity(0)))
    for directory in _own_cgroups():
        quota = _read(directory / "cpu.max").split()
        if len(quota) == 2 and quota[0] != "max":
            count = min(count, int(quota[0]) / int(quota[1]))
        old_quota, old_period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if old_quota and old_period and int(old_quota) > 0:
            count = min(count, int(old_quota) / int(old_period))
    return max(1, int(count))


def available_memory() -> int:
    """Bytes that can be allocated without swapping or reaching a cgroup's limit."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for directory in _own_cgroups():
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _read(directory / limit), _read(directory / usage)
            if most.isdigit() and used.isdigit():
                available = min(available, max(0, int(most) - int(used)))
    return available


def _own_cgroups() -> Iterator[Path]:
    """The directories of this process's cgroups and of all their parents."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        root = _CGROUPS / controllers if controllers else _CGROUPS
        directory = root / path.lstrip("/")
        while True:
            yield directory
            if directory == root or root not in directory.parents:
                break
            directory = directory.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
