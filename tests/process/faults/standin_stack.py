"""A server whose workers are stand-ins: everything else, supervisord.conf included, is the real thing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import standin
from stack import Stack
from standin import FOLDER_VARIABLE, LOST_NAME, MISSING_NAME, TRAPS_NAME, Computed, Seen, Traps
from waiting import wait_until


class StandInStack(Stack):
    """Like ``Stack``; ``set_traps`` changes at any time how its workers behave."""

    def __init__(self, *flags: str, model: Path, traps: Traps | None = None, environment: dict[str, str] | None = None) -> None:
        super().__init__(*flags, model=model, environment=environment)
        self._bin = self.run_dir.with_suffix(".bin")
        self._bin.mkdir(mode=0o700)
        self.command = [str(self._bin / "packhorse")]
        _write_script(self._bin / "packhorse", f'exec "{sys.executable}" "{standin.__file__}" "$@"')
        _write_script(self._bin / "python", f'exec "{sys.executable}" "$@"')
        found = self.environment.get("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        self.environment = {
            **self.environment,
            "PATH": os.pathsep.join([str(self._bin), found]),
            FOLDER_VARIABLE: str(self.run_dir),
        }
        self.traps = traps or Traps()
        self.set_traps()

    def wait_ready(self, workers: int = 1, frontends: int = 1) -> StandInStack:
        """Wait until so many workers and frontends are ready."""
        super().wait_ready(workers)
        for index in range(frontends):
            joined = f"frontend joined frontend={index} "
            wait_until(lambda: joined in (self.run_dir / "broker.log").read_text(), 60, joined)  # noqa: B023
        self._seen |= set(self.processes())
        return self

    def start(self) -> StandInStack:
        super().start()
        return self

    def set_traps(self, **changes: Any) -> None:
        """Let the workers behave otherwise from their next batch on."""
        self.traps = msgspec.structs.replace(self.traps, **changes)
        new = self.run_dir / f"{TRAPS_NAME}.new"
        new.write_bytes(msgspec.json.encode(self.traps))
        new.replace(self.run_dir / TRAPS_NAME)

    def computed(self) -> list[Computed]:
        """Every batch that a worker of this server has begun so far, the canaries included, by time."""
        return sorted(self._computed(), key=lambda each: each.began)

    def _computed(self) -> Iterator[Computed]:
        for path in self.run_dir.glob("computed-*.log"):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else it is being written, or its worker was killed over it
                    yield msgspec.json.decode(line, type=Computed)

    def seen(self) -> dict[str, Seen]:
        """What the worker of each slot, its last one, sees of the machine; by the name that it has in /status."""
        paths = sorted(self.run_dir.glob("seen-*.json"), key=lambda path: path.stat().st_mtime_ns)
        return {_name(found): found for found in (msgspec.json.decode(path.read_bytes(), type=Seen) for path in paths)}

    def lose_device(self) -> None:
        """The next batch, on whatever worker, meets a device that is lost."""
        (self.run_dir / LOST_NAME).touch()

    def take_devices_away(self) -> None:
        """CUDA finds no device from now on; workers that run already do not notice."""
        (self.run_dir / MISSING_NAME).touch()

    def give_devices_back(self) -> None:
        (self.run_dir / MISSING_NAME).unlink()

    def forget_deaths(self) -> None:
        """Release the crash brakes, which would hold up the next workers for the deaths of the tests before."""
        for path in self.run_dir.glob("worker-*.starts"):
            path.unlink(missing_ok=True)

    def clean(self) -> None:
        super().clean()
        shutil.rmtree(self._bin, ignore_errors=True)


StandInFactory = Callable[..., StandInStack]
"""The fixtures ``make_standin`` and ``make_shared_standin``: flags, ``environment=`` and the fields of ``Traps``."""


def _name(worker: Seen) -> str:
    return f"worker-{worker.slot}" if worker.slot >= 0 else f"worker-{worker.pid}"


def _write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o700)
