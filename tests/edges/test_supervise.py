"""The launcher over a real supervisord and the shipped file, with small stand-ins for broker, workers and frontends."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from packhorse.conf import conf_path
from packhorse.control import Supervisor
from packhorse_shared.run_dir import RunDir
from stack import free_port
from waiting import wait_until

pytestmark = pytest.mark.process

PART = """
import os, signal, sys, time
from packhorse.cli import _end_with_supervisord
_end_with_supervisord()
role = os.environ["SUPERVISOR_PROCESS_NAME"]
def say(level, text):
    print(f"2026-01-01T00:00:00.000Z {level} {role} {text}", flush=True)
def stop(*_):
    say("INFO", "drains")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
say("INFO", "up with " + os.environ.get("PACKHORSE_API_KEY", "no key"))
if os.environ.get("FAIL") == role:
    say("ERROR", "model: there is no such thing")
    sys.exit(3)
if os.environ.get("CRASH") == role:
    say("ERROR", "something nobody thought of")
    sys.exit(1)
if os.environ.get("KILLED") == role:
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("STUBBORN") == role:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if role == "broker":
    from packhorse_shared.arguments import load_settings
    from packhorse_shared.run_dir import RunningServer, run_dir_of
    import argparse
    settings = load_settings(argparse.Namespace(), os.environ)
    run_dir = run_dir_of(settings.process, settings.http.port, None)
    held = run_dir.lock()
    run_dir.write_server(RunningServer("http://x", os.environ["SUPERVISOR_SERVER_URL"]))
while True:
    time.sleep(600)
"""
LAUNCHER = """
import signal
import sys
from pathlib import Path
import packhorse.embeddings as command
from packhorse.cli import main
command.conf_path = lambda: Path(sys.argv[1])
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup hand its choice on
sys.exit(main(["embeddings", *sys.argv[2:]]))
"""


class Launcher:
    """`packhorse embeddings` on the shipped file with its three roles replaced."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = RunDir(folder / "run")
        self.port = free_port()
        self.output = folder / "out"
        self.conf = folder / "supervisord.conf"
        (folder / "part.py").write_text(PART)
        text = conf_path().read_text(encoding="utf-8")
        part = f"command={sys.executable} {folder / 'part.py'}"
        self.conf.write_text(re.sub(r"command=packhorse (broker|worker|frontend)", part, text), encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: set[psutil.Process] = set()

    def start(self, *flags: str, before: Callable[[], None] | None = None, **environ: str) -> Launcher:
        argv = [f"--port={self.port}", f"--run_dir={self.run_dir.path}", "--devices=cpu", *flags]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(self.conf), *argv],
                stderr=file,
                stdout=file,
                env=dict(os.environ) | environ,
                preexec_fn=before,  # noqa: PLW1509 (the tests run in one thread)
            )
        return self

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def up(self, *names: str) -> Launcher:
        """Wait until these parts say that they are up."""
        wait_until(lambda: all(f"{name} up" in self.text() for name in names), 30, f"{names} in:\n{self.text()}")
        assert self.process is not None
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def status(self, within_s: float = 30) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def left(self) -> list[psutil.Process]:
        return [each for each in self.seen if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def supervisor(self) -> Supervisor:
        return Supervisor(f"unix://{self.run_dir.path / 'supervisor.sock'}")


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory(prefix="ph-") as folder:
        made = Launcher(Path(folder))
        yield made
        if made.process is not None and made.process.poll() is None:
            made.process.kill()
            made.process.wait(10)
        wait_until(lambda: not made.left(), 10, f"{made.left()} to end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_drains_frontends_first_and_ends_with_0(launcher: Launcher, number: signal.Signals) -> None:
    launcher.start("--num_frontends=2", "--workers_per_device=2", '--api_key=se%cr"et')
    launcher.up("broker", "frontend-0", "frontend-1", "worker-0", "worker-1")
    launcher.send(number)
    assert launcher.status() == 0, launcher.text()
    assert not launcher.left()
    drained = re.findall(r"(\w+)\S* drains", launcher.text())
    assert drained == ["frontend", "frontend", "worker", "worker", "broker"]
    lines = launcher.text().splitlines()
    assert f"run directory {launcher.run_dir.path}" in lines[0]
    assert lines[-1].endswith("INFO packhorse stopped")
    assert 'worker-0 up with se%cr"et' in launcher.text()
    assert "worker-2" not in launcher.text()


def test_a_signal_at_the_very_start_is_an_orderly_stop(launcher: Launcher) -> None:
    """supervisord is told to stop before it can take signals, and dies of that one."""
    launcher.start()
    wait_until(lambda: "starts, model" in launcher.text(), 30)
    launcher.send(signal.SIGTERM)
    assert launcher.status() == 0, launcher.text()
    assert launcher.text().splitlines()[-1].endswith("INFO packhorse stopped")


def test_what_stops_supervisord_before_it_has_a_log_is_told(launcher: Launcher) -> None:
    (launcher.run_dir.path / "supervisord.log").mkdir(mode=0o700, parents=True)
    launcher.run_dir.path.chmod(0o700)
    launcher.start()
    assert launcher.status() == 1
    assert "supervisord ended by itself" in launcher.text().splitlines()[-1]
    assert "supervisord.log" in launcher.text().splitlines()[-1]


def test_too_few_open_files_is_one_clear_line(launcher: Launcher) -> None:
    limit = (resource.RLIMIT_NOFILE, (256, 256))
    launcher.start(before=lambda: resource.setrlimit(*limit))
    assert launcher.status() == 1
    assert launcher.text().splitlines()[-1].endswith("the limit is 256 (ulimit -n), supervisord needs 1024; raise it")


@pytest.mark.parametrize("part", ["worker-0", "frontend-0", "broker"])
def test_a_part_that_cannot_start_ends_the_server_with_1_and_says_why_last(launcher: Launcher, part: str) -> None:
    launcher.start(FAIL=part)
    assert launcher.status() == 1, launcher.text()
    assert launcher.text().splitlines()[-1].endswith(f"ERROR packhorse {part} cannot start: model: there is no such thing")


@pytest.mark.parametrize("part", ["broker", "worker-0", "frontend-0"])
def test_a_part_that_crashes_at_every_start_ends_a_server_that_was_never_ready(launcher: Launcher, part: str) -> None:
    """supervisord would start it again for ever, and a deployment would wait for a server that cannot come."""
    assert launcher.start(CRASH=part).status() == 1
    assert launcher.text().strip().splitlines()[-1].endswith(f"{part} cannot start: something nobody thought of")


def test_a_part_that_is_killed_at_every_start_is_told_with_the_signal(launcher: Launcher) -> None:
    assert launcher.start(KILLED="worker-0").status() == 1
    last = launcher.text().strip().splitlines()[-1]
    assert (
        "worker-0 cannot start: it was killed by SIGKILL, by the kernel if memory ran out (see dmesg); the last in its log: "
        in last
    )


def test_a_second_signal_forces(launcher: Launcher) -> None:
    launcher.start(STUBBORN="worker-0").up("broker", "worker-0", "frontend-0")
    launcher.send(signal.SIGTERM)
    wait_until(lambda: "frontend-0 drains" in launcher.text(), 10)
    launcher.send(signal.SIGINT)
    assert launcher.status(within_s=10) == 1
    wait_until(lambda: not launcher.left(), 5, f"{launcher.left()}")


def test_kill_of_the_launcher_leaves_nothing_and_the_next_start_works(launcher: Launcher) -> None:
    launcher.start().up("broker", "worker-0", "frontend-0")
    launcher.send(signal.SIGKILL)
    launcher.status()
    wait_until(lambda: not launcher.left(), 15, f"{launcher.left()}")
    launcher.output.unlink()
    launcher.start().up("broker", "worker-0", "frontend-0")
    launcher.send(signal.SIGTERM)
    assert launcher.status() == 0, launcher.text()


def test_the_end_of_supervisord_ends_everything(launcher: Launcher) -> None:
    launcher.start().up("broker", "worker-0", "frontend-0")
    pid = int((launcher.run_dir.path / "supervisord.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert launcher.status() == 1
    assert "supervisord ended by itself" in launcher.text().splitlines()[-1]
    wait_until(lambda: not launcher.left(), 5, f"{launcher.left()}")


def test_a_part_that_dies_or_leaves_is_started_again(launcher: Launcher) -> None:
    launcher.start().up("broker", "worker-0", "frontend-0")
    first = launcher.supervisor().processes()["worker-0"].pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: launcher.text().count("worker-0 up") == 2, 10, launcher.text())
    second = launcher.supervisor().processes()["worker-0"].pid
    assert second not in {0, first}
    os.kill(second, signal.SIGTERM)
    wait_until(lambda: launcher.text().count("worker-0 up") == 3, 10, launcher.text())
    launcher.send(signal.SIGTERM)
    assert launcher.status() == 0


def test_scale_starts_and_stops_slots_for_good(launcher: Launcher) -> None:
    def scale(count: int) -> str:
        return subprocess.run(
            [sys.executable, "-m", "packhorse", "scale", str(count), f"--run_dir={launcher.run_dir.path}"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()

    launcher.start().up("broker", "worker-0", "frontend-0")
    wait_until(launcher.run_dir.server_file.exists, 10)
    first = launcher.supervisor().processes()["worker-0"]
    assert scale(3) == "started worker-1, worker-2"
    launcher.up("worker-1", "worker-2")
    assert scale(1) == "stopping worker-2, worker-1"
    wait_until(lambda: launcher.text().count("drains") == 2, 10)
    assert scale(1) == "1 workers run already"
    assert launcher.supervisor().processes()["worker-0"] == first
    assert [each.name for each in launcher.supervisor().processes().values() if each.group == "worker" and each.is_up] == [
        "worker-0"
    ]
    launcher.send(signal.SIGTERM)
    assert launcher.status() == 0


def test_plain_supervisord_with_an_empty_environment_runs_the_same_processes(launcher: Launcher) -> None:
    launcher.run_dir.prepare()
    environ = {"PACKHORSE_RUN_DIR": str(launcher.run_dir.path), "PACKHORSE_DEVICES": "cpu", "PACKHORSE_NUM_FRONTENDS": "2"}
    bin_folder = Path(sys.executable).parent
    launcher.process = subprocess.Popen(
        [bin_folder / "supervisord", "-c", str(launcher.conf)],
        cwd=launcher.run_dir.path,
        stdout=subprocess.DEVNULL,
        env=dict(os.environ) | environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"},
    )
    logs = {"broker": "broker", "worker-0": "worker-0", "frontend-0": "frontend-0", "frontend-1": "frontend-1"}

    def shown(name: str) -> str:
        path = launcher.run_dir.path / f"{name}.log"
        return path.read_text() if path.exists() else ""

    wait_until(lambda: all(f"{word} up" in shown(name) for name, word in logs.items()), 30)
    launcher.seen |= set(psutil.Process(launcher.process.pid).children(recursive=True))
    launcher.send(signal.SIGTERM)
    assert launcher.status() == 0
    assert all("drains" in shown(name) for name in logs)
    assert not launcher.left()
