"""The crash brake: a worker that keeps dying soon after its start waits a little before it loads again.

supervisord restarts a dead worker at once, and has no pause of its own that suits a load of unknown length.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

_WINDOW_S = 60.0
_FREE_DEATHS = 2
_LONGEST_WAIT_S = 10.0
_BLIND_WAIT_S = 1.0
"""Where starts cannot be noted (a full disk), every one waits a little: the next death may be near."""


class Brake:
    """Remembers in a small file when this slot's worker was started and did not end well."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, now: float) -> float:
        """Note a start; returns the seconds to wait before loading.

        ``now``: of the machine's monotonic clock. The third death within a minute waits 1 s, each further one twice as
        long, 10 s at most.
        """
        starts = [start for start in self._read() if 0 <= now - start < _WINDOW_S]
        try:
            self._path.write_text(json.dumps([*starts, now][-10:]), encoding="ascii")
        except OSError:
            return _BLIND_WAIT_S
        over = len(starts) - _FREE_DEATHS
        return 0.0 if over <= 0 else min(_LONGEST_WAIT_S, 2.0 ** (over - 1))

    def end(self) -> None:
        """The worker ends as it should: forget its starts."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self) -> list[float]:
        try:
            found = json.loads(self._path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return []
        return [float(each) for each in found if isinstance(each, int | float)] if isinstance(found, list) else []
