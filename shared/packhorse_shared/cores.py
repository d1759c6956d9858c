"""How many cores this process may really use: thread pools sized by the host's cores are slow in a container."""

from __future__ import annotations

import os
from pathlib import Path

from packhorse_shared.cgroups import OWN, ROOT, folders_of


def usable_cores() -> int:
    """Cores by affinity and by cgroup quota, whichever is fewer; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = _quota_cores(OWN, ROOT)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def _quota_cores(own_cgroup: Path, root: Path) -> float | None:
    """The tightest CPU quota from this process's cgroup (version 2) up to the root, in cores; None without one.

    Source: Linux kernel documentation, cgroup-v2, ``cpu.max``: ``$MAX $PERIOD`` in microseconds, or ``max``.
    """
    quotas = [quota for each in folders_of("", own_cgroup, root) if (quota := _read_quota(each))]
    return min(quotas, default=None)


def _read_quota(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
