"""The broker as a process of its own, without anything around it."""

from __future__ import annotations

import subprocess
import sys

from packhorse_shared.run_dir import RunDir
from waiting import wait_until


class Broker:
    """A broker process in a run directory of its own."""

    def __init__(self, run_dir: RunDir, *flags: str) -> None:
        self.run_dir = run_dir
        self.log_file = run_dir.path / "broker.log"
        command = [sys.executable, "-m", "packhorse_broker", "--run_dir", str(run_dir.path), *flags]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def log(self) -> str:
        return self.log_file.read_text()

    def wait_listening(self) -> Broker:
        wait_until(lambda: "broker listens" in self.log() or self.process.poll() is not None, 10, "the broker's start")
        assert self.process.poll() is None, self.log()
        return self

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
