"""What supervisord says on its standard error: why it would not begin, and what it could not write into its logs.

It goes through a pipe. In a file it would be on the very disk that is full when there is most to say, and a supervisord that
cannot say it ends. The pipe has to be read all the time, since a full one blocks supervisord; little of it is kept.
"""

from __future__ import annotations

import os
from typing import IO

_CHUNK_BYTES = 64 * 1024
_KEPT_BYTES = 16 * 1024
_PREFIX = "Error: "


class Complaints:
    """The reading end of the pipe."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._kept = b""
        os.set_blocking(stream.fileno(), False)

    def read(self) -> None:
        """Take in what came since the last call; never waits."""
        try:
            while data := os.read(self._stream.fileno(), _CHUNK_BYTES):
                self._kept = (self._kept + data)[-_KEPT_BYTES:]
        except BlockingIOError:
            return

    def last(self) -> str | None:
        """Why supervisord ended, in its own words: the line that begins with ``Error:``, or the last one it said."""
        lines = [line.strip() for line in self._kept.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
        return next(iter(errors or lines[-1:]), None)
