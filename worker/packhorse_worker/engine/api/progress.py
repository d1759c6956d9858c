"""The progress bar of long lists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONG_LIST_INPUTS = 2048
"""From so many inputs on a list takes long enough for somebody to wonder."""


@contextmanager
def progress_bar(inputs: int, asked: bool | None) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr, as a function to be told how many more inputs are done; None where no bar is shown.

    ``asked``: whether to show one; None shows it for long lists when stderr is a terminal.
    """
    if not (inputs >= _LONG_LIST_INPUTS and _is_terminal() if asked is None else asked):
        yield None
        return
    # Half of the price of this module, paid by who sees a bar.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("encoding"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("encoding", total=inputs)

        def advance(more: int) -> None:
            bar.advance(task, more)

        yield advance


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
