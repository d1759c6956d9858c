"""What a process may use: devices, cores, and its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import stub_gpus
from packhorse_shared import cores, nvml
from packhorse_shared.cores import usable_cores
from packhorse_shared.devices import checked_words, find_devices
from packhorse_shared.errors import SettingsError
from packhorse_shared.nvml import Inventory, read_inventory
from stub_gpus import MISMATCH, NO_DRIVER, NO_PERMISSION, NOT_LOADED, UNKNOWN, cards, pretend

UUIDS = tuple(f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "abcdefgh")
EIGHT = cards(*UUIDS)
NONE = {"error": NO_DRIVER}
SLICED = {
    "cards": [
        {"uuid": UUIDS[0], "slices": ["MIG-1a", "MIG-1b"]},
        {"uuid": UUIDS[1]},
        {"uuid": UUIDS[2], "slices": []},
        {"uuid": UUIDS[3], "is_old": True},
    ]
}


def environment(visible: str | None, **others: str) -> dict[str, str]:
    return others if visible is None else {"CUDA_VISIBLE_DEVICES": visible, **others}


@pytest.mark.parametrize(
    ("given", "visible", "machine", "expected"),
    [
        (("auto",), "GPU-aaaa,GPU-bbbb", EIGHT, ("GPU-aaaa", "GPU-bbbb")),
        (("auto",), "GPU-aaaa,GPU-bbbb", NONE, ("GPU-aaaa", "GPU-bbbb")),
        (("auto",), " 3 , MIG-1/2/3 ", NONE, ("3", "MIG-1/2/3")),
        (("auto",), None, EIGHT, tuple("01234567")),
        (("auto",), None, cards(UUIDS[0]), ("0",)),
        (("auto",), "3,1", EIGHT, ("3", "1")),
        (("auto",), "MIG-1b,MIG-1a", SLICED, ("MIG-1b", "MIG-1a")),
        (("auto",), f"MIG-{UUIDS[0]}/2/0", SLICED, (f"MIG-{UUIDS[0]}/2/0",)),
        (("auto",), "MIG-elsewhere", EIGHT, ("MIG-elsewhere",)),
        (("auto",), None, SLICED, ("MIG-1a", "MIG-1b", UUIDS[1], UUIDS[3])),
        (("cpu",), "0,1", EIGHT, ("cpu",)),
        (("cpu",), None, EIGHT, ("cpu",)),
        (("3", "GPU-x"), "GPU-x,3", NONE, ("3", "GPU-x")),
        (("7", "GPU-AAAA"), None, EIGHT, ("7", "GPU-AAAA")),
        ((" 1 ",), None, EIGHT, ("1",)),
        (("1",), None, NONE, ("1",)),
    ],
)
def test_device_words_are_opaque(
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    visible: str | None,
    machine: dict[str, Any],
    expected: tuple[str, ...],
) -> None:
    pretend(monkeypatch, machine)
    found = find_devices(given, environment(visible))
    assert found.words == expected
    assert [remark.text for remark in found.remarks if "left out" not in remark.text] == []


@pytest.mark.parametrize(
    ("visible", "words", "behind"),
    [
        ("0,-1,1", ("0",), "1"),
        ("0,2,-1,1", ("0", "2"), "1"),
        ("0,,1", ("0",), "1"),
        ("0,1,", ("0", "1"), ""),
        ("0,NoDevFiles", ("0",), ""),
        ("GPU-aaaa,none,GPU-bbbb,GPU-cccc", ("GPU-aaaa",), "GPU-bbbb,GPU-cccc"),
        ("-1,3", ("cpu",), ""),
    ],
)
def test_cuda_hides_what_stands_behind_an_entry_that_is_none(
    monkeypatch: pytest.MonkeyPatch, visible: str, words: tuple[str, ...], behind: str
) -> None:
    pretend(monkeypatch, EIGHT)
    found = find_devices(("auto",), environment(visible))
    assert found.words == words
    hidden = [remark for remark in found.remarks if "stands behind" in remark.text]
    assert [remark.text.endswith(f", so {behind} is not used") for remark in hidden] == [True] * bool(behind)
    assert all(remark.is_warning for remark in hidden)


@pytest.mark.parametrize("visible", ["", " ", ",", "-1", "-2", "none", "void", "NoDevFiles", "nodevfiles"])
@pytest.mark.parametrize("machine", [EIGHT, NONE])
def test_no_visible_gpu_is_the_cpu_with_one_line(
    monkeypatch: pytest.MonkeyPatch, visible: str, machine: dict[str, Any]
) -> None:
    """Batch systems and container runtimes say "no GPU" in words of their own."""
    pretend(monkeypatch, machine)
    found = find_devices(("auto",), environment(visible))
    assert found.words == ("cpu",)
    (remark,) = found.remarks
    assert remark.text == f"no GPU to use, so the model runs on the CPU: CUDA_VISIBLE_DEVICES={visible} hides every GPU"
    assert not remark.is_warning, "somebody wanted it so"


@pytest.mark.parametrize(
    ("machine", "others", "is_warning", "reason"),
    [
        (NONE, {}, False, "no NVIDIA driver is installed"),
        (NONE, {"NVIDIA_VISIBLE_DEVICES": "void"}, False, "no NVIDIA driver is installed"),
        (NONE, {"NVIDIA_VISIBLE_DEVICES": "all"}, True, "although NVIDIA_VISIBLE_DEVICES=all: .*--gpus all"),
        ({"error": NOT_LOADED}, {}, True, "not loaded"),
        ({"error": MISMATCH}, {}, True, "different versions; reboot"),
        ({"error": NO_PERMISSION}, {}, True, "may not use .*/dev/nvidia"),
        ({"error": UNKNOWN}, {}, True, "does not answer: error 999"),
        ({"cards": []}, {}, True, "lists no GPU"),
        ({"cards": [{"lost": True}]}, {}, True, "GPU 0 is left out: GPU is lost"),
        ({"cards": [{"uuid": "GPU-a", "slices": []}]}, {}, True, "GPU 0 is left out: it is in MIG mode and has no slice"),
    ],
)
def test_a_driver_that_broke_says_why_the_model_is_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], others: dict[str, str], is_warning: bool, reason: str
) -> None:
    pretend(monkeypatch, machine)
    found = find_devices(("auto",), others)
    assert found.words == ("cpu",)
    (remark,) = found.remarks
    assert remark.is_warning == is_warning
    with pytest.raises(AssertionError, match=f"^no GPU to use, so the model runs on the CPU: .*{reason}"):
        raise AssertionError(remark.text)


def test_a_lost_card_is_left_out_and_shifts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA skips a card that fell off its bus, and the indexes behind it mean others then."""
    pretend(monkeypatch, {"cards": [{"uuid": "GPU-a"}, {"lost": True}, {"uuid": "GPU-c"}]})
    found = find_devices(("auto",), {})
    assert found.words == ("GPU-a", "GPU-c")
    assert [remark.text for remark in found.remarks] == ["GPU 1 is left out: GPU is lost"]
    assert find_devices(("1", "GPU-unknown"), {}).words == ("1", "GPU-unknown"), "only CUDA can tell now"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "empty"),
        (("auto", "0"), "stand alone"),
        (("cpu", "0"), "stand alone"),
        (("1", "1"), "a device is named twice .1,1.; use --workers_per_device"),
        (("all",), "'all' is no device: .* say --devices auto"),
        (("none",), "'none' is no device; for none say --devices cpu"),
        (("0", "-1"), "'-1' is no device; for none say --devices cpu"),
        (("CPU",), "'CPU' is no device; write cpu"),
        (("Auto",), "'Auto' is no device; write auto"),
        (("cuda:1",), "'cuda:1' is no device to CUDA; write its index 1, its UUID, or auto"),
        (("gpu",), "'gpu' is no device to CUDA; write its index, its UUID, or auto"),
        (("0 1",), "'0 1' is no device; put commas between devices"),
        (("GPU-\x1b[2J",), "put commas"),
        (("GPU-" + "a" * 300,), r"'GPU-a{60}\.\.\.' is no device: it has 304 characters, limit 256"),
        (("x" * 100_000,), r"'x{64}\.\.\.' is no device: it has 100000 characters, limit 256"),
        (("0-3",), "'0-3' is no device; write each index by itself, as in 0,1,2"),
        (("0..3",), "'0..3' is no device; write each index by itself"),
        (("0:3",), "'0:3' is no device: .*NVIDIA_VISIBLE_DEVICES; write the UUID of the slice"),
        (("0;1",), "'0;1' is no device; put commas between devices"),
        (("0|1",), "'0|1' is no device; put commas between devices"),
        (("cpu:0",), "'cpu:0' is no device; write cpu"),
        (("1.5",), "'1.5' is no device; an index is a whole number such as 0, a UUID begins with GPU- or MIG-"),
        (("+1",), "'.1' is no device; an index is a whole number such as 0"),
        (("0x1",), "'0x1' is no device; an index is a whole number such as 0"),
        (('"0',), "is no device; an index is a whole number such as 0"),
        (("\u0663",), "is no device; an index is a whole number such as 0"),
        (("GPU-\u00e4",), "is no device; an index is a whole number such as 0"),
        (("GPU-",), "'GPU-' is no device; an index is a whole number such as 0"),
        (("gpu-a",), "'gpu-a' is no device; an index is a whole number such as 0, a UUID begins with GPU- or MIG-"),
        (("00", "0"), "00 and 0 are the same device; use --workers_per_device"),
        (("GPU-AA", "1", "GPU-aa"), "GPU-AA and GPU-aa are the same device"),
        (("0", "", "1"), "'0,,1' has an empty entry"),
        (("0", " "), "has an empty entry"),
        (tuple(map(str, range(1000))), "names 1000 devices, limit 64"),
        (tuple("0" * 65), "names 65 devices, limit 64"),
        (("GPU-" + "a" * 200, "GPU-" + "A" * 200), r"GPU-a{60}\.\.\. and GPU-A{60}\.\.\. are the same device"),
    ],
)
def test_device_words_that_are_wrong_anywhere(given: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=f"^devices: .*{words}") as raised:
        checked_words(given)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("word", ["0", "63", "007", "GPU-8932f937", "GPU-8932f937-d72c-4106", "MIG-1a", "MIG-GPU-89-32/1/0"])
def test_device_words_that_may_be_right_somewhere(word: str) -> None:
    assert checked_words((word,)) == (word,)


def test_as_many_devices_as_there_are_slots() -> None:
    assert len(checked_words(tuple(map(str, range(64))))) == 64


@pytest.mark.parametrize("name", ["devices", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("machine", "words", "problem"),
    [
        (EIGHT, "0,8", "'8' names no device of this machine; there is GPU 0 to 7 .nvidia-smi -L."),
        (cards("GPU-a"), "1", "'1' names no device of this machine; there is GPU 0 "),
        (cards("GPU-aab", "GPU-ab"), "GPU-b", "'GPU-b' names no device of this machine; there is GPU-aab, GPU-ab "),
        (
            cards("GPU-aab", "GPU-ab", "GPU-b"),
            "GPU-a",
            "'GPU-a' names several devices: GPU-aab, GPU-ab; write more of the UUID",
        ),
        (SLICED, "MIG-1", "'MIG-1' names several devices: MIG-1a, MIG-1b; write more of the UUID"),
        (cards("GPU-a"), "gpu-a", "'gpu-a' is no device; .* a UUID begins with GPU- or MIG-"),
        (cards("GPU-a"), "GPU-" + "b" * 250, r"'GPU-b{60}\.\.\.' names no device of this machine"),
        (SLICED, "MIG-2", "'MIG-2' names no device of this machine; there is MIG-1a, MIG-1b "),
        (SLICED, "0:1", "'0:1' is no device: .*write the UUID of the slice"),
        (EIGHT, '"0,1"', "'\"0' is no device"),
        (EIGHT, ",".join(map(str, range(100))), "names 100 devices, limit 64"),
        (EIGHT, "3,GPU-dddd", "3 and GPU-dddd are the same device; use --workers_per_device"),
        (EIGHT, "03,3", "03 and 3 are the same device"),
        (EIGHT, "2,2", "a device is named twice .2,2."),
        (EIGHT, "all", "'all' is no device: .*NVIDIA_VISIBLE_DEVICES"),
    ],
)
def test_a_word_that_names_nothing_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, machine: dict[str, Any], words: str, problem: str
) -> None:
    pretend(monkeypatch, machine)
    given, visible = (tuple(words.split(",")), None) if name == "devices" else (("auto",), words)
    with pytest.raises(SettingsError, match=f"^{name}: {problem}") as raised:
        find_devices(given, environment(visible))
    assert "\n" not in str(raised.value)


def test_without_a_driver_to_ask_no_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (NO_DRIVER, NOT_LOADED, UNKNOWN):
        pretend(monkeypatch, {"error": error})
        assert find_devices(("99", "GPU-x", "03", "2"), {}).words == ("99", "GPU-x", "03", "2")


def test_indexes_in_an_order_of_the_users_own_are_not_compared_with_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, EIGHT)
    assert find_devices(("0", "GPU-aaaa"), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}).words == ("0", "GPU-aaaa")


def test_a_list_of_devices_counts_every_gpu_whatever_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, EIGHT)
    found = find_devices(("1", "3"), environment("3,4"))
    assert found.words == ("1", "3")
    (remark,) = found.remarks
    assert remark.is_warning
    assert remark.text.startswith("devices: 1 is not in CUDA_VISIBLE_DEVICES=3,4; a list of devices takes its place")
    assert find_devices(("4",), environment("3,4")).remarks == ()


def test_for_the_cpu_the_driver_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import fails
    assert find_devices(("cpu",), {}).words == ("cpu",)
    assert find_devices(("auto",), environment("")).words == ("cpu",)


def test_asking_the_driver_makes_no_cuda_context() -> None:
    code = (
        "from packhorse_shared.nvml import read_inventory; import sys; read_inventory()\n"
        "print('torch' in sys.modules, 'libcuda.so' in open('/proc/self/maps').read())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.split() == ["False", "False"]


def test_the_stub_driver_has_the_names_of_the_real_one() -> None:
    """What the tests pretend is called as NVIDIA's own module calls it, with the same numbers."""
    import pynvml

    stub = stub_gpus.load()
    names = [name for name in vars(stub) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 10
    for name in names:
        real = getattr(pynvml, name)
        assert not name.startswith("NVML_ERROR") or real == getattr(stub, name), name
    assert pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST).value == pynvml.NVML_ERROR_GPU_IS_LOST


def test_a_machine_as_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SLICED)
    found = read_inventory()
    assert [card.index for card in found.cards] == [0, 1, 2, 3]
    assert [None if card.slices is None else [each.uuid for each in card.slices] for card in found.cards] == [
        ["MIG-1a", "MIG-1b"],
        None,
        [],
        None,
    ]
    assert found.count == 4
    assert not found.is_broken
    pretend(monkeypatch, NONE)
    assert read_inventory() == Inventory(problem="no NVIDIA driver is installed")


def test_a_driver_that_lets_us_wait_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(monkeypatch, EIGHT)
    told = threading.Event()
    monkeypatch.setattr(caplog.handler, "release", lambda: (logging.Handler.release(caplog.handler), told.set()))
    monkeypatch.setattr(nvml, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys.modules["pynvml"], "nvmlInit", lambda: told.wait(30) or pytest.fail("nothing was said"))
    assert read_inventory().count == 8
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("waiting for the NVIDIA driver")


def test_a_driver_that_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for machine in (EIGHT, NONE, {"error": MISMATCH}):
        pretend(monkeypatch, machine)
        read_inventory()
    assert caplog.records == []
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


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
