"""What the launcher makes of supervisord's slots and logs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import packhorse.slots as slots_module
from packhorse.complaints import Complaints
from packhorse.control import Process, ProcessState, Supervisor, set_worker_count
from packhorse.failures import FailureWatch, PartFailed, killed_by
from packhorse.slots import start_slots
from packhorse.tail import LogTail, Terminal
from packhorse_shared.devices import Devices, find_devices
from packhorse_shared.errors import PackhorseError
from packhorse_shared.settings import MAX_FRONTENDS, MAX_PROCESSES
from stub_gpus import cards, pretend
from waiting import wait_until

RUNNING, EXITED, STOPPED = ProcessState.RUNNING, ProcessState.EXITED, ProcessState.STOPPED


def process(name: str, state: ProcessState, status: int = 0, start: int = 100, *, error: str = "", pid: int = 1) -> Process:
    return Process(name.partition("-")[0], name, state, pid, start, status, error)


def look(watch: FailureWatch, *processes: Process, was_ready: bool = True) -> list[tuple[str, bool]]:
    found = watch.look({each.name: each for each in processes}, was_ready=was_ready)
    return [(failed.name, failed.ends_server) for failed in found]


FILLED = process("slots", EXITED)
BROKER = process("broker", RUNNING)


def test_nothing_fails_while_all_run() -> None:
    watch = FailureWatch()
    assert look(watch, BROKER, process("slots", RUNNING), process("worker-1", STOPPED, start=0)) == []
    assert look(watch, BROKER, FILLED, process("worker-0", RUNNING)) == []


@pytest.mark.parametrize("status", [2, 3])
@pytest.mark.parametrize("name", ["broker", "slots", "frontend-0"])
def test_a_part_that_all_need_ends_the_server(name: str, status: int) -> None:
    watch = FailureWatch()
    assert look(watch, process("worker-0", RUNNING), process(name, EXITED, status)) == [(name, True)]


def test_a_command_that_supervisord_cannot_start() -> None:
    fatal = process("broker", ProcessState.FATAL, error="can't find command 'packhorse'")
    assert FailureWatch().look({"broker": fatal}, was_ready=False) == [
        PartFailed("broker", "can't find command 'packhorse'", True)
    ]


def test_a_crash_is_not_a_failure_to_start() -> None:
    assert look(FailureWatch(), BROKER, FILLED, process("worker-0", EXITED, 1), process("worker-1", EXITED, -1)) == []


@pytest.mark.parametrize(("was_ready", "expected"), [(False, [("worker-0", True)]), (True, [])])
def test_crashes_at_every_start_end_a_server_that_was_never_ready(was_ready: bool, expected: list[tuple[str, bool]]) -> None:
    watch = FailureWatch()
    for pid in (11, 12, 12, 13):
        assert look(watch, BROKER, FILLED, process("worker-0", RUNNING, pid=pid), was_ready=was_ready) == []
    fourth = process("worker-0", RUNNING, pid=14)
    assert look(watch, BROKER, FILLED, fourth, was_ready=was_ready) == expected
    assert look(watch, BROKER, FILLED, fourth, was_ready=was_ready) == [], "told once"


def test_a_first_worker_that_cannot_start_ends_the_server_even_if_others_run() -> None:
    watch = FailureWatch()
    look(watch, BROKER, process("slots", RUNNING), process("worker-0", RUNNING), process("worker-1", RUNNING))
    assert look(watch, BROKER, FILLED, process("worker-0", EXITED, 3), process("worker-1", RUNNING)) == [("worker-0", True)]


def test_a_worker_that_ran_before_leaves_the_others_alone_and_is_told_once() -> None:
    watch = FailureWatch()
    other = process("worker-1", RUNNING)
    look(watch, BROKER, FILLED, process("worker-0", RUNNING, start=100), other)
    failed = process("worker-0", EXITED, 3, start=200)
    assert look(watch, BROKER, FILLED, failed, other) == [("worker-0", False)]
    assert look(watch, BROKER, FILLED, failed, other) == []
    assert look(watch, BROKER, FILLED, process("worker-0", EXITED, 3, start=300), other) == [("worker-0", False)]


def test_a_worker_added_later_leaves_the_others_alone() -> None:
    watch = FailureWatch()
    first = process("worker-0", RUNNING)
    look(watch, BROKER, FILLED, first)
    assert look(watch, BROKER, FILLED, first, process("worker-1", EXITED, 3, start=200)) == [("worker-1", False)]


def test_the_last_worker_ends_the_server() -> None:
    watch = FailureWatch()
    look(watch, BROKER, FILLED, process("worker-0", RUNNING, start=100))
    assert look(watch, BROKER, FILLED, process("worker-0", EXITED, 3, start=200)) == [("worker-0", True)]


LOG = """
2026-01-01 00:00:00,000 WARN exited: worker-1 (terminated by SIGSEGV (core dumped); not expected)
2026-01-01 00:00:00,000 WARN exited: slots (exit status 1; not expected)
2026-01-01 00:00:01,000 INFO spawned: 'slots' with pid 17
2026-01-01 00:00:02,000 WARN exited: slots (terminated by SIGKILL; not expected)
2026-01-01 00:00:02,000 WARN exited: worker-11 (terminated by SIGABRT; not expected)
2026-01-01 00:00:03,000 WARN exited: broker (terminated by SIGKILL; not expected)
2026-01-01 00:00:04,000 INFO exited: broker (exit status 3; expected)
"""


@pytest.mark.parametrize(
    ("name", "signal_name"), [("slots", "SIGKILL"), ("worker-1", "SIGSEGV"), ("broker", None), ("frontend-0", None)]
)
def test_the_signal_that_ended_a_part_is_read_from_supervisords_log(name: str, signal_name: str | None) -> None:
    assert killed_by(name, LOG) == signal_name


# ---- slots ----


class FakeSupervisor(Supervisor):
    """Slots without processes; keeps the orders."""

    def __init__(self, up: set[str]) -> None:
        super().__init__("unix:///nowhere")
        self.up = up
        self.orders: list[str] = []

    def processes(self) -> dict[str, Process]:
        names = [f"worker-{n}" for n in range(MAX_PROCESSES)] + [f"frontend-{n}" for n in range(MAX_FRONTENDS)]
        return {name: process(name, RUNNING if name in self.up else STOPPED) for name in names}

    def start(self, group: str, name: str) -> None:
        self.orders.append(f"start {group}:{name}")

    def stop(self, group: str, name: str) -> None:
        self.orders.append(f"stop {group}:{name}")


@pytest.mark.parametrize(
    ("up", "count", "orders"),
    [
        ({"worker-0"}, 3, ["start worker:worker-1", "start worker:worker-2"]),
        ({"worker-0", "worker-2"}, 3, ["start worker:worker-1"]),
        ({"worker-0", "worker-9", "worker-10"}, 1, ["stop worker:worker-10", "stop worker:worker-9"]),
        ({"worker-4"}, 1, []),
        ({"worker-0"}, 0, ["stop worker:worker-0"]),
    ],
)
def test_scaling_touches_no_other_worker(up: set[str], count: int, orders: list[str]) -> None:
    supervisor = FakeSupervisor(up)
    started, stopped = set_worker_count(supervisor, count)
    assert supervisor.orders == orders
    assert [f"start worker:{name}" for name in started] + [f"stop worker:{name}" for name in stopped] == orders


def test_slots_that_are_up_are_not_started_again() -> None:
    supervisor = FakeSupervisor({"worker-0"})
    start_slots(supervisor, "worker", 3)
    assert supervisor.orders == ["start worker:worker-1", "start worker:worker-2"]


def run_slots(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, list[str]]:
    """The exit status, and the orders to supervisord with the questions to the driver in between."""
    supervisor = FakeSupervisor(set())

    def find(devices: Sequence[str], environ: Mapping[str, str]) -> Devices:
        supervisor.orders.append("ask the driver")
        return find_devices(devices, environ)

    monkeypatch.setattr(slots_module, "Supervisor", lambda url: supervisor)
    monkeypatch.setattr(slots_module, "find_devices", find)
    monkeypatch.setattr(slots_module, "configure_logs", lambda *_: None)
    pretend(monkeypatch, cards("GPU-a", "GPU-b"))
    run_dir = f"--run_dir={folder / 'run'}"
    return slots_module.slots([run_dir, *flags], {"SUPERVISOR_SERVER_URL": "unix:///nowhere"}), supervisor.orders


def test_frontends_start_before_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take long to answer, or never do, and frontends say meanwhile that the server loads."""
    status, orders = run_slots(tmp_path, monkeypatch, "--num_frontends=2")
    frontends = ["start frontend:frontend-0", "start frontend:frontend-1"]
    assert (status, orders) == (0, [*frontends, "ask the driver", "start worker:worker-0", "start worker:worker-1"])


@pytest.mark.parametrize(
    ("flags", "orders", "words"),
    [
        (["--devices=2"], ["start frontend:frontend-0", "ask the driver"], "devices: '2' names no device of this machine"),
        (["--workers_per_device=40"], ["start frontend:frontend-0", "ask the driver"], "workers_per_device: 40 on each of 2"),
        (["--api_key_file=/no/such"], [], "--api_key_file: there is no file"),
    ],
)
def test_a_start_that_cannot_be_is_one_line_and_starts_no_worker(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    flags: list[str],
    orders: list[str],
    words: str,
) -> None:
    assert run_slots(tmp_path, monkeypatch, *flags) == (3, orders)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(words)


def test_no_supervisord_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(PackhorseError, match=f"no answer from supervisord at unix://{tmp_path}/none.sock"):
        Supervisor(f"unix://{tmp_path}/none.sock").processes()


# ---- logs ----


class Screen:
    """A terminal over a pipe, and what arrived on it."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_NONBLOCK)
        self.terminal = Terminal(self.write_end)

    def text(self) -> str:
        try:
            return os.read(self.read_end, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        os.close(self.write_end)


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_new_whole_lines_of_the_parts_are_shown(tmp_path: Path) -> None:
    (tmp_path / "broker.log").write_text("old\n")
    tail, screen = LogTail(tmp_path), Screen()
    append(tmp_path / "broker.log", "new\npart")
    append(tmp_path / "worker-0.log", "w0\n")
    append(tmp_path / "supervisord.log", "not a part\n")
    tail.copy_to(screen.terminal)
    assert screen.text() == "new\nw0\n"
    append(tmp_path / "broker.log", "ial\n")
    tail.copy_to(screen.terminal)
    assert screen.text() == "partial\n"
    screen.close()


def test_rotated_and_cut_files_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    tail, screen = LogTail(tmp_path), Screen()
    append(path, "a\n")
    tail.copy_to(screen.terminal)
    append(path, "b\n")
    path.rename(tmp_path / "worker-0.log.1")
    append(path, "c\n")
    tail.copy_to(screen.terminal)
    tail.copy_to(screen.terminal)
    assert screen.text() == "a\nb\nc\n"
    path.write_text("")
    tail.copy_to(screen.terminal)
    append(path, "d\n")
    tail.copy_to(screen.terminal)
    assert screen.text() == "d\n"
    screen.close()


def test_a_terminal_that_takes_nothing_blocks_nobody_and_loses_nothing(tmp_path: Path) -> None:
    tail, screen = LogTail(tmp_path), Screen()
    lines = "".join(f"line {number:06}\n" for number in range(50_000))
    append(tmp_path / "worker-0.log", lines)
    shown = ""
    tail.copy_to(screen.terminal)
    assert not screen.terminal.has_room()
    while more := screen.text():
        shown += more
        tail.copy_to(screen.terminal)
    assert shown == lines
    screen.close()


def test_a_closed_terminal_is_no_error(tmp_path: Path) -> None:
    tail, screen = LogTail(tmp_path), Screen()
    os.close(screen.read_end)
    append(tmp_path / "worker-0.log", "a\n")
    tail.copy_to(screen.terminal)
    screen.terminal.write("b\n")
    assert screen.terminal.has_room()
    screen.close()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["2026 ERROR worker-0 first", "2026 ERROR worker-0 model: no folder", "2026 INFO worker-0 bye"], "model: no folder"),
        (['{"level": "error", "message": "model: bad"}', '{"level": "info", "message": "bye"}'], "model: bad"),
        (["packhorse worker: --slot: wrong"], "packhorse worker: --slot: wrong"),
        (["{not json", ""], "{not json"),
    ],
)
def test_the_last_error_is_the_reason(tmp_path: Path, lines: list[str], expected: str) -> None:
    (tmp_path / "worker-0.log").write_text("2025 ERROR worker-0 of an earlier run\n")
    tail, screen = LogTail(tmp_path), Screen()
    assert tail.last_error("worker-0") is None
    assert tail.last_error("worker-1") is None
    append(tmp_path / "worker-0.log", "".join(f"{line}\n" for line in lines))
    tail.copy_to(screen.terminal)
    assert tail.last_error("worker-0") == expected
    screen.close()


def test_a_removed_folder_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "broker.log").write_text("")
    tail = LogTail(folder)
    shutil.rmtree(folder)
    read_end, write_end = os.pipe()
    assert not tail.copy_to(Terminal(write_end))
    os.close(read_end)
    os.close(write_end)


def test_a_full_disk_under_our_own_output_costs_what_is_written_meanwhile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    terminal = Terminal(write_end)
    really_write = os.write

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    terminal.write("lost")
    monkeypatch.setattr(os, "write", really_write)
    terminal.write("shown")
    os.close(write_end)
    assert os.read(read_end, 100) == b"shown"
    os.close(read_end)


def test_supervisords_complaints_are_read_without_waiting_and_kept_in_a_bound() -> None:
    """They go through a pipe: in a file they would need room on the disk whose fullness they may be about."""
    script = "import sys; sys.stderr.write('Traceback\\n' * 200_000 + 'OSError: the last one\\n')"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        complaints = Complaints(process.stderr)
        assert complaints.last() is None
        wait_until(lambda: complaints.read() or process.poll() is not None, 20)
        complaints.read()
        assert complaints.last() == "OSError: the last one"
    with subprocess.Popen(["/bin/sh", "-c", "echo 'Error: a; bad; b' >&2; echo usage >&2"], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        complaints = Complaints(process.stderr)
        process.wait()
        complaints.read()
        assert complaints.last() == "a; bad; b"
