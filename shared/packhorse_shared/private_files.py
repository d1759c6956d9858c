"""Small files of a run directory: read without being held up, written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_LONGEST_BYTES = 1 << 20


def read_private(path: Path) -> bytes:
    """The first MiB of a file. Raises OSError, for what is no file too: a pipe of that name would hold us up for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(_LONGEST_BYTES)
    finally:
        os.close(descriptor)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all. Raises OSError."""
    if path.is_file() and path.read_bytes() == content:
        return  # a broker that is started again needs no room on the disk
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)
