"""A frontend or a broker whose loop is stuck ends, and says in its log where it was stuck."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from packhorse_shared.errors import PackhorseError
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import query_status
from stack import free_port
from waiting import wait_until

PROGRAM = """
import sys, time
from packhorse_shared import watchdog
watchdog.Watchdog.__init__.__defaults__ = (2.0,)

def stuck_here(*_):
    time.sleep(30)

{patch}
sys.exit(main(sys.argv[1:]))
"""
FRONTEND = """
from packhorse_frontend import routes
async def live(*_): stuck_here()
routes._live = live
from packhorse_frontend.__main__ import main
"""
BROKER = """
from packhorse_broker import core, events
core._HANDLERS[events.StatusAsked] = stuck_here
from packhorse_broker.__main__ import main
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ph-"))
    yield path
    shutil.rmtree(path)


def start(patch: str, folder: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(patch=patch), f"--run_dir={folder}", f"--port={port}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def connect(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=10)
    except OSError:
        return None


@contextmanager
def ends_stuck(process: subprocess.Popen[str]) -> Iterator[None]:
    """The block makes its loop stuck, which must end the process."""
    try:
        yield
        assert process.wait(timeout=10) == 1
        assert process.stderr is not None
        assert "in stuck_here" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def assert_patient(process: subprocess.Popen[str]) -> None:
    """Being idle for longer than the watchdog's patience ends nobody."""
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3.0)


def test_a_stuck_frontend_ends(folder: Path) -> None:
    port = free_port()
    process = start(FRONTEND, folder, port)
    with ends_stuck(process):
        connection = wait_until(lambda: connect(port), within_s=20)
        assert_patient(process)
        with connection:
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            process.wait(timeout=10)


def test_a_stuck_broker_ends(folder: Path) -> None:
    process = start(BROKER, folder, free_port())
    run_dir = RunDir(folder)
    with ends_stuck(process):
        wait_until(run_dir.is_live, within_s=20)
        assert_patient(process)
        with pytest.raises(PackhorseError, match="did not answer"):
            query_status(run_dir, timeout_s=0.2)
