"""How many CPUs this process may use: by its affinity, and by the CPU quota of its container."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath


def usable_cpus() -> int:
    """Return the CPUs to plan threads and processes for, at least 1.

    A quota (docker --cpus 2, or a Kubernetes limit) hides no CPU. With a thread for each of 64 CPUs, a quota of 2 is used up in the
    first milliseconds of every period, and all of them stop for the rest of it.
    """
    cpus, quota = visible_cpus(), cpu_quota()
    return cpus if quota is None else max(1, min(cpus, math.ceil(quota)))


def visible_cpus() -> int:
    """Return the CPUs that this process may run on, whatever its quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs whose time the control groups of this process allow; None without a limit, and where there are none."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [_quota_v2(folder) for folder in _folders(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            for mount in (controllers, "cpu"):
                found += [_quota_v1(folder) for folder in _folders(root / "sys/fs/cgroup" / mount, path)]
    return min((one for one in found if one is not None), default=None)


def _folders(mount: Path, path: str) -> list[Path]:
    """Return the folders of a group and of those around it: the smallest quota holds. A container may see its own as the mount."""
    group = PurePosixPath(path.lstrip("/"))
    return [mount / one for one in (group, *group.parents)]


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return the quota in CPUs; None for `max`, -1 and files that are not there."""
    try:
        microseconds, of = int(quota), int(period)
    except ValueError:
        return None
    return microseconds / of if microseconds > 0 and of > 0 else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
