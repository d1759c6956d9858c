"""A whole Packhorse, started as a user starts it, for the tests of tests/process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx
import psutil

from waiting import wait_until

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parent.parent
START_WITHIN_S = 90.0
STOP_WITHIN_S = 45.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """``packhorse embeddings`` (or plain supervisord) with its own port and run directory."""

    def __init__(self, *flags: str, model: Path | None = None, environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        # A short path: the path of a Unix socket is limited to 107 bytes, and pytest's own temporary folders are deep.
        self.run_dir = Path(tempfile.mkdtemp(prefix="ph-"))
        self.flags = flags
        self.model = model
        self.environment = environment or {}
        self.output = self.run_dir.with_suffix(".out")
        self.process: subprocess.Popen[bytes] | None = None
        self.command = [sys.executable, "-m", "packhorse"]
        """How packhorse is started; ``PATH`` of ``environment`` says the same to supervisord."""
        # One client, because making one reads all certificates; no kept connections, because servers come and go here.
        self.http = httpx.Client(base_url=self.url, timeout=10, limits=httpx.Limits(max_keepalive_connections=0))
        self._seen: set[psutil.Process] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def child_environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PACKHORSE_")}
        bin_dir = str(Path(sys.executable).parent)
        return kept | {"HF_HUB_OFFLINE": "1", "PATH": f"{bin_dir}:{kept['PATH']}"} | self.environment

    def start(self) -> Stack:
        """Start through the launcher; does not wait."""
        command = [*self.command, "embeddings"]
        command += [str(self.model)] if self.model else []
        command += [f"--port={self.port}", f"--run_dir={self.run_dir}", *self.flags]
        return self._launch(command, cwd=Path.cwd(), environment=self.child_environment())

    def start_under_supervisord(self) -> Stack:
        """Start plain ``supervisord -c supervisord.conf`` with the settings in the environment; does not wait."""
        settings = {"PACKHORSE_PORT": str(self.port), "PACKHORSE_RUN_DIR": str(self.run_dir)}
        if self.model:
            settings["PACKHORSE_MODEL"] = str(self.model)
        supervisord = str(Path(sys.executable).parent / "supervisord")
        return self._launch(
            [supervisord, "-n", "-c", str(ROOT / "supervisord.conf")],
            cwd=self.run_dir,
            environment=self.child_environment() | settings,
        )

    def _launch(self, command: list[str], cwd: Path, environment: dict[str, str]) -> Stack:
        file: IO[bytes]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd, env=environment
            )
        return self

    def wait_ready(self, workers: int = 1) -> Stack:
        """Wait until /health is 200 and that many workers are ready."""
        wait_until(lambda: self._is_ready(workers), START_WITHIN_S, f"{workers} ready workers; output:\n{self.text()}")
        self._seen |= set(self.processes())
        return self

    def _is_ready(self, workers: int) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"ended with {self.process.poll()} at start:\n{self.text()}"
        try:
            if self.http.get("/health").status_code != 200:
                return False
            status = self.http.get("/status")
            if status.status_code != 200:  # of several frontends another one may answer, which has not found the broker yet
                return False
            return sum(worker["state"] in ("ready", "busy") for worker in status.json()["workers"]) >= workers
        except httpx.TransportError:
            return False

    def text(self) -> str:
        """All that the launcher printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def status(self) -> dict[str, Any]:
        answer = self.http.get("/status")
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    def workers(self, *states: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["state"] in states]

    def processes(self, role: str | None = None) -> list[psutil.Process]:
        """Living processes below the launcher, of one role or all."""
        assert self.process is not None
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if role is None or _is_role(child, role)]

    def join_worker(self, *flags: str) -> subprocess.Popen[bytes]:
        """``packhorse worker`` from another shell."""
        command = [*self.command, "worker", f"--run_dir={self.run_dir}", *flags]
        with self.output.open("ab") as file:
            return subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.child_environment()
            )

    def packhorse(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another packhorse command against this server."""
        return subprocess.run(
            [*self.command, *arguments],
            env=self.child_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def client(self, **options: Any) -> openai.OpenAI:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", **options)

    def terminate(self) -> None:
        """Send SIGTERM; does not wait."""
        assert self.process is not None
        self._seen |= set(self.processes())
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """SIGTERM, and the exit status. Nothing may be left behind."""
        self.terminate()
        return self.wait_stopped()

    def wait_stopped(self) -> int:
        """The exit status, once it ends. Nothing may be left behind."""
        assert self.process is not None
        status = self.process.wait(STOP_WITHIN_S)
        self.assert_all_gone(within_s=5)
        return status

    def assert_all_gone(self, within_s: float) -> None:
        wait_until(lambda: not self._living(), within_s, f"processes gone: {self._living()}")

    def _living(self) -> Sequence[psutil.Process]:
        return [each for each in self._seen if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    def clean(self) -> None:
        """End whatever still runs and remove the folders: for teardown, whatever happened."""
        if self.process is not None:
            leftovers = set(self.processes()) | set(self._living())
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(10)
            for each in leftovers:
                if each.is_running():
                    each.kill()
        self.http.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.output.unlink(missing_ok=True)


def _is_role(process: psutil.Process, role: str) -> bool:
    try:
        return role in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
