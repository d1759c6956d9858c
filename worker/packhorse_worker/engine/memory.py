"""How much memory a worker may take, and how many tokens fit into it by rule: ``--max_num_tokens auto`` on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch

MOST_TOKENS = 16_384
"""Beyond this a larger forward gains no throughput and only adds latency."""
FEWEST_TOKENS = 512
SHARE_OF_FREE = 0.5
"""The allocator fragments, and neighbours want memory too."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def auto_num_tokens(free_bytes: int, hidden_size: int, intermediate_size: int, bytes_per_value: int) -> int:
    """Tokens that fit into half of the free memory, in steps of 64, between 512 and 16384.

    A token of a forward holds about 16 vectors of the hidden size (residual stream, query, key, value, attention output and
    their copies), 4 of the feed-forward's inner size, and 2 of the hidden size in float32 for the pooling.
    """
    bytes_per_token = bytes_per_value * (16 * hidden_size + 4 * intermediate_size) + 4 * 2 * hidden_size
    tokens = int(free_bytes * SHARE_OF_FREE) // bytes_per_token
    return max(FEWEST_TOKENS, min(MOST_TOKENS, tokens // 64 * 64))


def free_bytes(device: torch.device, workers: int) -> int:
    """Memory that this worker may still take: what is free on its device, shared by the ``workers`` on it.

    On a GPU no worker may take more than its part of the whole card either: what others are yet to load looks free. On CPU it
    is MemAvailable or what the cgroup leaves, whichever is less.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, min(free // workers, total // workers - torch.cuda.memory_reserved(device)))
    available = next(
        int(line.split()[1]) * 1024
        for line in _MEMINFO.read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable:")
    )
    return min(available, _cgroup_left(*_CGROUP_LIMITS, default=available)) // workers


def _cgroup_left(limit: Path, current: Path, default: int) -> int:
    try:
        return max(0, int(limit.read_text(encoding="ascii")) - int(current.read_text(encoding="ascii")))
    except (OSError, ValueError):
        return default  # no cgroup of version 2, or no limit ("max")
