"""The progress bar, on a terminal only."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from packhorse.bench.load import Plan
from packhorse.bench.samples import Samples

_SHOW_EVERY_S = 0.25


def _text(field: str) -> TextColumn:
    return TextColumn(f"{{task.{field}}}", markup=False)


class ProgressBar:
    """One bar for the whole run, drawn from the event loop: a thread of its own would take time from the load."""

    def __init__(self, slices: int) -> None:
        """``slices``: how many there are in all, warm-up included."""
        console = Console(stderr=True)
        columns = (_text("description"), BarColumn(), _text("fields[now]"), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=console, disable=not console.is_terminal, transient=True, auto_refresh=False
        )
        self._task = self._progress.add_task("", total=slices, now="")
        self._before = 0
        self._shown_at = 0.0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, what: str) -> None:
        """A slice begins."""
        self._progress.update(self._task, description=what, completed=self._before, now="")
        self._before += 1

    def show(self, plan: Plan, samples: Samples) -> None:
        """What the slice has come to."""
        now = time.monotonic()
        if self._progress.disable or now - self._shown_at < _SHOW_EVERY_S:
            return
        self._shown_at = now
        seconds = now - samples.begun_at
        done = seconds / plan.duration_s if plan.duration_s else samples.begun / (plan.requests or 1)
        latest = f"{samples.answered / seconds:.0f} requests/s"
        if done >= 1:
            latest = f"waiting for {samples.still_open} answers"
        for count, what in ((samples.refused, "refused"), (samples.failed, "failed")):
            latest += f", {count} {what}" if count else ""
        self._progress.update(self._task, completed=self._before - 1 + min(done, 1.0), now=latest)
        self._progress.refresh()
