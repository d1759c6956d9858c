"""A Linux timerfd: ``zmq.Poller`` counts whole milliseconds (0.1 ms is 0), and this wakes it tens of microseconds late.

Through ctypes, because ``os.timerfd_create`` came with Python 3.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_NANOSECONDS = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A file descriptor that becomes readable at a time of ``time.monotonic()``. Close it when done."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._checked(
            self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC), "timerfd_create"
        )
        self._armed_for: float | None = None

    def arm(self, when: float | None) -> None:
        """Become readable at ``when``, at once if that is past; never if it is None."""
        if when == self._armed_for:
            return
        self._armed_for = when
        spec = _TimerSpec()
        if when is not None:
            # All zero would disarm it.
            nanoseconds = max(1, int(when * _NANOSECONDS))
            spec.value.seconds, spec.value.nanoseconds = divmod(nanoseconds, _NANOSECONDS)
        result = self._libc.timerfd_settime(self.descriptor, _ABSOLUTE, ctypes.byref(spec), None)
        self._checked(result, "timerfd_settime")

    def clear(self) -> None:
        """Read what expired, so that the descriptor is quiet until it is armed again."""
        self._armed_for = None
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 8)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)

    @staticmethod
    def _checked(result: int, call: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{call}: {os.strerror(number)}")
        return result
