"""Running a server in the foreground: start supervisord, show its logs, pass signals on, tell how it ended.

supervisord runs in a session of its own, so that Ctrl-C reaches this process alone, and is killed when this process ends,
however it ends; its own processes end with it (``packhorse_shared.lifetime``). So nothing of a run outlives the launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packhorse.complaints import Complaints
from packhorse.control import Supervisor
from packhorse.failures import FailureWatch, PartFailed, killed_by
from packhorse.tail import LogTail, Terminal
from packhorse_shared.errors import PackhorseError
from packhorse_shared.lifetime import die_with_parent
from packhorse_shared.run_dir import RunDir
from packhorse_shared.sockets import query_status

log = logging.getLogger(__name__)

SOCKET_NAME = "supervisor.sock"
_LOG_NAME = "supervisord.log"
_LAST_LOG_BYTES = 65_536
_TICK_S = 0.1
_LOOK_EVERY_S = 5.0
"""supervisord is asked when its log grew, and this often in any case."""
_MARGIN_S = 10.0
"""What a stop may take beyond ``shutdown_grace``: the parts stop one kind after the other."""
_CONTROL_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Run:
    """What the launcher starts."""

    folder: Path
    conf: Path
    environment: Mapping[str, str]
    shutdown_grace_s: float


def supervise(run: Run, terminal: Terminal, greeting: str) -> int:
    """Run a server until it ends or is told to; returns the exit status: 0 after an orderly stop, 1 otherwise.

    ``greeting``: the first line. Whoever reads it may send signals from then on.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.add(signal.SIGHUP)
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        log.info(greeting)
        tail = LogTail(run.folder)
        child = _start_supervisord(run, previous_mask)
        return _Launcher(run, child, tail, terminal, signals).watch()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _start_supervisord(run: Run, signal_mask: set[int | signal.Signals]) -> subprocess.Popen[bytes]:
    launcher_pid = os.getpid()

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        die_with_parent(launcher_pid)

    return subprocess.Popen(  # noqa: S603 (our own interpreter and file)
        [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", str(run.conf)],
        cwd=run.folder,
        env=dict(run.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=in_child,  # noqa: PLW1509 (this process has one thread, and nothing else sets PDEATHSIG before exec)
    )


class _Launcher:
    """The loop: wait for a signal, copy logs, look at the parts."""

    def __init__(
        self, run: Run, child: subprocess.Popen[bytes], tail: LogTail, terminal: Terminal, signals: set[signal.Signals]
    ) -> None:
        self._run = run
        self._child = child
        assert child.stderr is not None
        self._complaints = Complaints(child.stderr)
        self._tail = tail
        self._terminal = terminal
        self._signals = signals
        self._supervisor = Supervisor(f"unix://{run.folder / SOCKET_NAME}", _CONTROL_TIMEOUT_S)
        self._watch = FailureWatch()
        self._seen_log: tuple[int, int] | None = None
        self._next_look = 0.0
        self._was_ready = False
        self._stop_by: float | None = None
        self._failure: str | None = None
        """Why the server ends; told as the last line, when the other parts have said theirs."""

    def watch(self) -> int:
        """Until supervisord has ended."""
        while True:
            received = signal.sigtimedwait(self._signals, _TICK_S)
            self._complaints.read()
            self._tail.copy_to(self._terminal)
            if self._child.poll() is not None:
                return self._ended(self._child.returncode)
            if received is not None and self._stop_by is not None:
                return self._force("on a second signal")
            if received is not None:
                log.info("stopping; accepted requests get %g s, a second signal forces", self._run.shutdown_grace_s)
                self._stop()
            if self._stop_by is None:
                self._look()
            else:
                self._supervisor.wake()
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                return self._force("because the parts did not end within --shutdown_grace")

    def _look(self) -> None:
        """Ask supervisord how the parts stand when its log says that something happened."""
        try:
            found = (self._run.folder / _LOG_NAME).stat()
        except OSError:
            return
        if (found.st_ino, found.st_size) == self._seen_log and time.monotonic() < self._next_look:
            return
        try:
            processes = self._supervisor.processes()
        except PackhorseError:
            return  # it is not up yet, or is about to end, which the loop sees
        self._seen_log = (found.st_ino, found.st_size)
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        self._was_ready = self._was_ready or self._is_ready()
        for failed in self._watch.look(processes, was_ready=self._was_ready):
            self._report(failed)

    def _is_ready(self) -> bool:
        """Whether a worker has been ready since the broker began."""
        try:
            return query_status(RunDir(self._run.folder), _CONTROL_TIMEOUT_S).model is not None
        except PackhorseError:
            return False

    def _report(self, failed: PartFailed) -> None:
        reason = self._reason(failed).removeprefix("cannot start: ")
        if not failed.ends_server:
            log.error("%s cannot start again, the other workers go on: %s", failed.name, reason)
        elif self._failure is None:
            self._failure = f"{failed.name} cannot start: {reason}"
            self._stop()

    def _reason(self, failed: PartFailed) -> str:
        """Who is killed by a signal says nothing of it, and what it said before may have nothing to do with it."""
        if failed.spawn_error:
            return failed.spawn_error
        said = self._tail.last_error(failed.name)
        signal_name = killed_by(failed.name, self._supervisord_log())
        if signal_name is None:
            return said or "it left no reason in its log"
        hint = ", by the kernel if memory ran out (see dmesg)" if signal_name == "SIGKILL" else ""
        return f"it was killed by {signal_name}{hint}" + (f"; the last in its log: {said}" if said else "")

    def _supervisord_log(self) -> str:
        """Its end."""
        try:
            with (self._run.folder / _LOG_NAME).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LOG_BYTES))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _stop(self) -> None:
        self._stop_by = time.monotonic() + self._run.shutdown_grace_s + _MARGIN_S
        self._child.send_signal(signal.SIGTERM)

    def _force(self, why: str) -> int:
        log.error("killing all processes of the server %s", why)
        self._child.kill()
        self._child.wait()
        if self._failure is not None:
            log.error("%s", self._failure)
        return 1

    def _ended(self, status: int) -> int:
        deadline = time.monotonic() + 1.0
        while self._tail.copy_to(self._terminal) and time.monotonic() < deadline:
            pass
        self._complaints.read()
        if self._stop_by is None:
            reason = self._complaints.last() or f"see {self._run.folder / _LOG_NAME}"
            log.error("supervisord ended by itself (status %d): %s", status, reason)
            return 1
        # -SIGTERM: told to stop before it had set itself up, so nothing of the run had begun.
        if self._failure is not None or status not in (0, -signal.SIGTERM):
            log.error("%s", self._failure or f"supervisord ended with status {status}; see {self._run.folder / _LOG_NAME}")
            return 1
        log.info("stopped")
        return 0
