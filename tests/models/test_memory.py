"""How much memory a worker on a CPU counts on, and what it says when there is hardly any."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from packhorse_worker.engine import memory
from packhorse_worker.engine.memory import auto_num_tokens, free_bytes

MIB = 1 << 20
GIB = 1 << 30
NO_LIMIT = 0x7FFF_FFFF_FFFF_F000


def machine(
    root: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str, groups: dict[str, tuple[int | str, int]], own: str
) -> None:
    """``groups``: limit and use of each folder; below memory/ in the files of version 1."""
    for folder, figures in groups.items():
        is_old = folder.startswith("memory")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, figure in zip(names, figures, strict=True):
            (root / folder / name).write_text(f"{figure}\n")
    for name, text in (("meminfo", meminfo), ("own", own)):
        (root / name).write_text(text)
    monkeypatch.setattr(memory, "_MEMINFO", root / "meminfo")
    monkeypatch.setattr(memory, "OWN", root / "own")
    monkeypatch.setattr(memory, "ROOT", root)


@pytest.mark.parametrize(
    ("groups", "own", "expected"),
    [
        ({}, "0::/a/b\n", 8 * GIB),
        ({"a/b": (2 * GIB, GIB)}, "0::/a/b\n", GIB),
        ({"a": (2 * GIB, GIB), "a/b": ("max", GIB)}, "0::/a/b\n", GIB),
        ({"a": (3 * GIB, GIB), "a/b": (3 * GIB, 2 * GIB), ".": (GIB // 2, 0)}, "0::/a/b\n", GIB // 2),
        ({"a/b": (GIB, 2 * GIB)}, "0::/a/b\n", 0),
        ({"a/b": (100 * GIB, GIB)}, "0::/a/b\n", 8 * GIB),
        ({".": (2 * GIB, GIB)}, "0::/docker/of-the-host\n", GIB),
        ({"other": (GIB, 0)}, "0::/a\n", 8 * GIB),
        ({"memory": (NO_LIMIT, GIB), "memory/a": (3 * GIB, GIB)}, "7:cpu:/c\n4:hugetlb,memory:/a\n0::/\n", 2 * GIB),
        ({"memory": (3 * GIB, GIB)}, "4:memory:/docker/of-the-host\n", 2 * GIB),
        ({"a/b": ("nonsense", 1)}, "no such line\n", 8 * GIB),
    ],
)
def test_the_tightest_limit_of_all_cgroups_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: dict[str, tuple[int | str, int]], own: str, expected: int
) -> None:
    machine(tmp_path, monkeypatch, f"MemTotal: 99 kB\nMemAvailable: {8 * MIB} kB\n", groups, own)
    assert free_bytes(torch.device("cpu"), 1) == expected
    assert free_bytes(torch.device("cpu"), 4) == expected // 4


@pytest.mark.parametrize(
    ("own", "stat", "expected"),
    [
        ("0::/a\n", f"anon 5\ninactive_file {MIB}\nactive_file 9\n", GIB + MIB),
        ("4:memory:/a\n", f"inactive_file 7\ntotal_inactive_file {MIB}\n", GIB + MIB),
        ("0::/a\n", f"inactive_file {9 * GIB}\n", 2 * GIB),
        ("0::/a\n", "inactive_file much\nnonsense\n", GIB),
    ],
)
def test_files_that_the_kernel_would_drop_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, stat: str, expected: int
) -> None:
    """The weights themselves, which are read through the page cache, would count as memory in use."""
    folder = "memory/a" if "memory" in own else "a"
    machine(tmp_path, monkeypatch, f"MemAvailable: {8 * MIB} kB\n", {folder: (2 * GIB, GIB)}, own)
    (tmp_path / folder / "memory.stat").write_text(stat)
    assert free_bytes(torch.device("cpu"), 1) == expected


@pytest.mark.parametrize("meminfo", ["MemTotal: 100 kB\n\nMemFree: 50 kB\n", "", "MemAvailable:\n", "MemAvailable: much kB\n"])
def test_a_kernel_that_does_not_say_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meminfo: str) -> None:
    machine(tmp_path, monkeypatch, meminfo, {}, "")
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    assert free_bytes(torch.device("cpu"), 1) == 4_096_000


def test_hardly_any_free_memory_is_told_with_what_was_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert auto_num_tokens(10 * MIB, 1024, 4096, 4) == 512
    (record,) = caplog.records
    # 512 tokens of 4 x (16 x 1024 + 4 x 4096) + 8 x 1024 bytes are 68 MiB, twice that with the reserve.
    assert record.getMessage().startswith(
        "max_num_tokens auto: only 10 MiB of memory are free for this worker, where 512 tokens want 136 MiB with a reserve"
    )
    caplog.clear()
    assert auto_num_tokens(136 * MIB, 1024, 4096, 4) == 512
    assert caplog.records == []
