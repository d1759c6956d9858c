"""How much memory a worker may take, and how many tokens fit into it by rule: ``--max_num_tokens auto`` on a CPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from packhorse_shared.cgroups import OWN, ROOT, folders_of

log = logging.getLogger(__name__)

MOST_TOKENS = 16_384
"""Beyond this a larger forward gains no throughput and only adds latency."""
FEWEST_TOKENS = 512
SHARE_OF_FREE = 0.5
"""The allocator fragments, and neighbours want memory too."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The limit, what is in use, and of ``memory.stat`` what of that are files which the kernel drops when memory is wanted: in
control groups of version 2 and in version 1's controller.

Source: Linux kernel documentation, cgroup-v2 and cgroup-v1/memory."""


def auto_num_tokens(free_bytes: int, hidden_size: int, intermediate_size: int, bytes_per_value: int) -> int:
    """Tokens that fit into half of the free memory, in steps of 64, between 512 and 16384.

    A token of a forward holds about 16 vectors of the hidden size (residual stream, query, key, value, attention output and
    their copies), 4 of the feed-forward's inner size, and 2 of the hidden size in float32 for the pooling. One warning where
    not even the fewest fit.
    """
    bytes_per_token = bytes_per_value * (16 * hidden_size + 4 * intermediate_size) + 4 * 2 * hidden_size
    tokens = int(free_bytes * SHARE_OF_FREE) // bytes_per_token
    if tokens < FEWEST_TOKENS:
        log.warning(
            "max_num_tokens auto: only %d MiB of memory are free for this worker, where %d tokens want %d MiB with a reserve; "
            "so many are taken all the same, and may run out of memory",
            free_bytes >> 20,
            FEWEST_TOKENS,
            -(-int(FEWEST_TOKENS * bytes_per_token / SHARE_OF_FREE) >> 20),
        )
    return max(FEWEST_TOKENS, min(MOST_TOKENS, tokens // 64 * 64))


def free_bytes(device: torch.device, workers: int) -> int:
    """Memory that this worker may still take: what is free on its device, shared by the ``workers`` on it.

    On a GPU no worker may take more than its part of the whole card either: what others are yet to load looks free. On CPU it
    is MemAvailable or what the tightest cgroup leaves, whichever is less.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, min(free // workers, total // workers - torch.cuda.memory_reserved(device)))
    return min([_available(_MEMINFO), *_cgroups_left(OWN, ROOT)]) // workers


def _available(meminfo: Path) -> int:
    """What can be had without swapping; where the kernel (before 3.14, or a sandbox's) does not say it, what nobody uses."""
    try:
        lines = [line.split() for line in meminfo.read_text(encoding="ascii").splitlines()]
        found = [int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"]
    except (OSError, ValueError, IndexError):
        found = []
    return found[0] if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups_left(own_cgroup: Path, root: Path) -> list[int]:
    """What each cgroup that has a limit leaves, from this process's own up to the root."""
    found = []
    for controller, (limit, current, droppable) in _CGROUP_FILES.items():
        for folder in folders_of(controller, own_cgroup, root):
            try:
                most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, current))
            except (OSError, ValueError):
                continue  # no such folder, or no limit ("max")
            found.append(max(0, most - max(0, used - _stat(folder, droppable))))
    return found


def _stat(folder: Path, name: str) -> int:
    """A figure of a cgroup's ``memory.stat``; 0 where it is not told."""
    try:
        lines = [line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()]
        return next((int(line[1]) for line in lines if line[0] == name), 0)
    except (OSError, ValueError, IndexError):
        return 0
