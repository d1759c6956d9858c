"""How many cores this process may really use: thread pools sized by the host's cores are slow in a container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores by affinity and by cgroup quota, whichever is fewer; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = _quota_cores(_OWN_CGROUP, _CGROUP_ROOT)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def _quota_cores(own_cgroup: Path, root: Path) -> float | None:
    """The tightest CPU quota from this process's cgroup (version 2) up to the root, in cores; None without one.

    Source: Linux kernel documentation, cgroup-v2, ``cpu.max``: ``$MAX $PERIOD`` in microseconds, or ``max``.
    """
    try:
        lines = own_cgroup.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    relative = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / relative.lstrip("/")
    quotas = [quota for each in (folder, *folder.parents) if each.is_relative_to(root) and (quota := _read_quota(each))]
    return min(quotas, default=None)


def _read_quota(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
