"""Another machine, as far as one machine can play it: workers that join a server over tcp, with keys."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from packhorse_shared.key_folders import make_keys
from stack import Stack, free_port


class RemoteMachine:
    """Keys, a port, and the workers that were started with them; leaving the ``with`` block ends those."""

    def __init__(self, name: str = "gpu1") -> None:
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="ph-keys-"))
        self._name = name
        self._workers: list[subprocess.Popen[bytes]] = []
        make_keys(self.folder, [name])

    @property
    def server_flags(self) -> tuple[str, str]:
        """What lets a server take workers of this machine."""
        return (f"--broker=tcp://127.0.0.1:{self.port}", f"--curve_keys={self.folder / 'broker'}")

    @property
    def log_file(self) -> Path:
        return self.folder / "worker.log"

    def log(self) -> str:
        """All that its workers wrote."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def start_worker(self, stack: Stack, *flags: str, port: int | None = None) -> subprocess.Popen[bytes]:
        """``packhorse worker`` as that machine starts it; does not wait. ``port``: of a link to the broker."""
        command = [*stack.command, "worker", f"--broker=tcp://127.0.0.1:{port or self.port}"]
        command += [f"--curve_keys={self.folder / self._name}", *flags]
        environment = stack.child_environment() | {"STANDIN_RUN_DIR": str(stack.run_dir)}
        with self.log_file.open("ab") as file:
            started = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment, cwd=self.folder
            )
        self._workers.append(started)
        return started

    def name_of(self, worker: subprocess.Popen[bytes]) -> str:
        """Its id in the status."""
        return f"worker-{self._name}-{worker.pid}"

    def __enter__(self) -> RemoteMachine:
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self._workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        shutil.rmtree(self.folder)
