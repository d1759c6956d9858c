"""Where the limits of this process's control groups are: a limit may be set on its own one or on any above it.

Source: Linux manual, cgroups(7), ``/proc/[pid]/cgroup``: lines of ``hierarchy:controllers:path``; version 2 names none.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def folders_of(controller: str, own: Path = OWN, root: Path = ROOT) -> list[Path]:
    """The folders of version 1 that a controller (``memory``) has, or with ``""`` those of version 2, from this process's own
    up to the root of its tree. Empty where ``own`` cannot be read.

    Some may not be there: a container may show the host's path here, and of the folders the root only.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return []
    relative = next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "/")
    tree = root / controller
    folder = tree / relative.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(tree)]
