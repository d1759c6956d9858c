"""Whether this slot's worker has found its device since the server started: then a device that is missing may come back."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from packhorse_shared.private_files import read_private, write_private

log = logging.getLogger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STARTED = 19
"""Place of a process's start in its stat, behind its name. Source: proc_pid_stat(5), field 22."""


@dataclass(frozen=True)
class Sighting:
    """A small file that remembers it. What another server left there, or this one of another device, does not count."""

    path: Path
    word: str
    """What CUDA_VISIBLE_DEVICES says."""
    life: str
    """Of the server; see ``life_of``."""

    def note(self) -> None:
        """The device was found."""
        if self.is_noted():
            return
        try:
            write_private(self.path, self._text())
        except OSError as problem:
            log.warning("cannot note that the device was there; if it is lost, its worker is not tried again: %s", problem)

    def is_noted(self) -> bool:
        """Whether it was found before."""
        try:
            return read_private(self.path) == self._text()
        except OSError:
            return False

    def _text(self) -> bytes:
        return f"{self.life}\n{self.word}\n".encode()


def life_of(pid: int) -> str:
    """Names a living process for good: by its id, which others had before it, the machine's boot and when it started then."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return f"{_BOOT.read_text(encoding='ascii').strip()} {pid} {stat.rpartition(')')[2].split()[_STARTED]}"
    except OSError:  # another user's process may be hidden
        return str(pid)
