"""The progress bar of what takes long: long lists of inputs, and the capture of graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, steps: int, asked: bool | None, *, many: int = 1) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr, as a function to be told how many more steps are done; None where no bar is shown.

    ``asked``: whether to show one; None shows it for ``many`` steps or more when stderr is a terminal.
    """
    if not (steps >= many and _is_terminal() if asked is None else asked):
        yield None
        return
    # Half of the price of this module, paid by who sees a bar.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=steps)

        def advance(more: int) -> None:
            bar.advance(task, more)

        yield advance


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
