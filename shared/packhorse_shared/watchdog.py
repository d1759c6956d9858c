"""A process whose event loop is stuck ends by itself: alive but dead is the worst that a server can be.

Python's own faulthandler does it, in a thread that needs no interpreter lock: it writes every thread's traceback to the log and
ends the process, and supervisord starts another.
"""

from __future__ import annotations

import faulthandler
import time

PATIENCE_S = 30.0
"""How long a loop may take to come round. What holds one up for a moment takes milliseconds; nothing healthy takes this."""
_FEED_EVERY_S = 1.0


class Watchdog:
    """Ends the process with status 1 when it was not fed for so long. Not armed before it is fed first."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._fed_at = float("-inf")

    @property
    def longest_wait_s(self) -> float:
        """How long a loop may sleep and still feed it in good time."""
        return self._patience_s / 3

    def feed(self) -> None:
        """The loop has come round. Costs next to nothing: it is armed again once a second at most."""
        now = time.monotonic()
        if now - self._fed_at >= min(_FEED_EVERY_S, self.longest_wait_s):
            self._fed_at = now
            faulthandler.dump_traceback_later(self._patience_s, exit=True)

    def rest(self) -> None:
        """The loop has ended as it should."""
        faulthandler.cancel_dump_traceback_later()
