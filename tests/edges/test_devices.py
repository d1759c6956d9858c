"""What a process may use: devices, cores, and its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packhorse_shared import cores, devices
from packhorse_shared.cores import usable_cores
from packhorse_shared.devices import device_words
from packhorse_shared.errors import SettingsError


@pytest.mark.parametrize(
    ("given", "visible", "gpus", "expected"),
    [
        (("auto",), "GPU-aaaa,GPU-bbbb", 8, ("GPU-aaaa", "GPU-bbbb")),
        (("auto",), " 3 , MIG-1/2/3 ", 8, ("3", "MIG-1/2/3")),
        (("auto",), "", 8, ("cpu",)),
        (("auto",), None, 3, ("0", "1", "2")),
        (("auto",), None, 0, ("cpu",)),
        (("cpu",), "0,1", 8, ("cpu",)),
        (("3", "GPU-x"), "0", 8, ("3", "GPU-x")),
        ((" 1 ", ""), None, 8, ("1",)),
    ],
)
def test_device_words_are_opaque(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], visible: str | None, gpus: int, expected: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "_count_gpus", lambda: gpus)
    assert device_words(given, visible) == expected


@pytest.mark.parametrize(
    ("given", "words"), [((), "empty"), (("auto", "0"), "stand alone"), (("cpu", "0"), "stand alone"), (("1", "1"), "twice")]
)
def test_device_words_that_contradict(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        device_words(given, None)


def test_counting_gpus_makes_no_cuda_context() -> None:
    code = "from packhorse_shared.devices import _count_gpus; import sys; _count_gpus(); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "False"


def cgroup(root: Path, limits: dict[str, str], own: str = "/a/b") -> tuple[Path, Path]:
    for name, text in limits.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(text)
    file = root / "own"
    file.write_text(f"12:cpu:/old\n0::{own}\n")
    return file, root


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a/b": "200000 100000\n"}, 2.0),
        ({"a/b": "max 100000\n", "a": "150000 100000\n"}, 1.5),
        ({"a/b": "400000 100000\n", "a": "300000 100000\n"}, 3.0),
        ({"a/b": "max 100000\n"}, None),
        ({"a/b": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, limits: dict[str, str], expected: float | None) -> None:
    assert cores._quota_cores(*cgroup(tmp_path, limits)) == expected


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert cores._quota_cores(tmp_path / "missing", tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.0, 2), (2.9, 2), (0.5, 1), (64.0, 8)])
def test_usable_cores(monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "_quota_cores", lambda own, root: quota)
    assert usable_cores() == expected


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode().strip(), flush=True)
sys.stdin.read()
"""
CHILD = """
import sys, time
from packhorse_shared.lifetime import die_with_parent
die_with_parent(int(sys.argv[1]))
print("bound", flush=True)
time.sleep(600)
"""


def test_a_child_dies_with_its_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, word = parent.stdout.readline().split()
        assert word == "bound"
        ended = os.pidfd_open(int(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    with os.fdopen(ended) as watched:
        import select

        poller = select.poll()
        poller.register(watched, select.POLLIN)
        assert poller.poll(5000)


def test_a_child_whose_parent_is_gone_already_dies_at_once() -> None:
    code = "from packhorse_shared.lifetime import die_with_parent; die_with_parent(1 << 30); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == ""
