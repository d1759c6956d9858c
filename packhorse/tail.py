"""Following the log files of a run on the terminal."""

from __future__ import annotations

import errno
import json
import os
import re
import select
from pathlib import Path

_CHUNK_BYTES = 4096
"""A write of at most PIPE_BUF bytes to a pipe that select calls writable does not block (pipe(7))."""
_LAST_BYTES = 65_536
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMES = re.compile(r"(broker|slots|worker-\d+|frontend-\d+)\.log")


class Terminal:
    """Our stderr, written to only when that does not block: a terminal that is stopped, or a pipe that nobody reads, must not
    keep the launcher from its work. Once closed, and while its disk is full, what is written is dropped: it is in the files."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_closed = False

    def has_room(self, within_s: float = 0.0) -> bool:
        """Whether a chunk can be written now."""
        if self._is_closed:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(within_s * 1000))

    def write(self, text: str) -> None:
        """Write a line of our own; it is dropped when there is no room within a second. For ``logging.StreamHandler``."""
        if self.has_room(within_s=1.0):
            self.write_bytes(text.encode("utf-8", "replace")[:_CHUNK_BYTES])

    def write_bytes(self, data: bytes) -> None:
        """Write at most a chunk, after ``has_room``."""
        try:
            while data and not self._is_closed:
                data = data[os.write(self._descriptor, data) :]
        except OSError as problem:
            self._is_closed = problem.errno not in _NO_SPACE

    def flush(self) -> None:
        """Nothing is held back."""


class LogTail:
    """What is appended to the logs in a folder from now on, whole lines only. Files may come later, rotate or be cut."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Followed] = {}
        self._folder_changed_ns = 0
        for path in self._new_paths():
            self._files[path] = _Followed(path, path.stat().st_size)

    def copy_to(self, terminal: Terminal) -> bool:
        """Copy what is new for as long as there is room; returns whether anything was copied."""
        for path in self._new_paths():
            self._files[path] = _Followed(path, 0)
        copied = False
        for file in self._files.values():
            while terminal.has_room() and (lines := file.read_lines()):
                terminal.write_bytes(lines)
                copied = True
        return copied

    def last_error(self, name: str) -> str | None:
        """The last error of this run in the log of the slot ``name``: its message; else the log's last line, if any."""
        file = self._files.get(self._folder / f"{name}.log")
        lines = [] if file is None else file.last_lines()
        errors = (message for line in reversed(lines) if (message := _error_message(line)) is not None)
        return next(errors, lines[-1] if lines else None)

    def _new_paths(self) -> list[Path]:
        """Logs that are not followed yet. The folder is read only when something was made or removed in it."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns == self._folder_changed_ns:
                return []
            self._folder_changed_ns = changed_ns
            return self._unknown_paths()
        except OSError:
            return []  # somebody removed the folder: what is open is still followed

    def _unknown_paths(self) -> list[Path]:
        return sorted(
            path
            for path in self._folder.iterdir()
            if _NAMES.fullmatch(path.name) and path not in self._files and path.is_file()
        )


class _Followed:
    """One file: an open one is read to its end before a rotated one's successor is opened."""

    def __init__(self, path: Path, position: int) -> None:
        self._path = path
        self._position = position
        self._begin = position
        self._descriptor: int | None = None

    def read_lines(self) -> bytes:
        """Whole lines, at most a chunk; a longer line comes in parts. Empty when there is nothing new."""
        if self._descriptor is None and not self._open():
            return b""
        assert self._descriptor is not None
        data = os.pread(self._descriptor, _CHUNK_BYTES, self._position)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) < _CHUNK_BYTES:
            self._look_for_successor(self._descriptor)
            return b""
        lines = data[:end] if end else data
        self._position += len(lines)
        return lines

    def last_lines(self) -> list[str]:
        """The last lines written in this run."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - _LAST_BYTES, self._begin if self._begin <= size else 0))
                return [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            return []

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def _look_for_successor(self, descriptor: int) -> None:
        """After the end: a new file of the same name is read from its start, a cut one too."""
        try:
            present = self._path.stat()
        except OSError:
            return
        followed = os.fstat(descriptor)
        if present.st_ino != followed.st_ino and followed.st_size <= self._position:
            os.close(descriptor)
            self._descriptor, self._position, self._begin = None, 0, 0
        elif present.st_ino == followed.st_ino and followed.st_size < self._position:
            self._position = self._begin = 0


def _error_message(line: str) -> str | None:
    """The message of an error line in either log format; None for every other line."""
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            return None
        is_error = isinstance(record, dict) and record.get("level") in {"error", "critical"}
        return str(record.get("message")) if is_error else None
    words = line.split(" ", 3)
    return words[3] if len(words) == 4 and words[1] in {"ERROR", "CRITICAL"} else None
