"""``packhorse bench``: the load test of a running server, of this kind or another that speaks the same API."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

from packhorse_shared.errors import PackhorseError

_EXTRA = "pip install 'packhorse[bench]'"


class BenchError(PackhorseError):
    """The load test cannot be run, or found that the server failed. The message is one line."""


def bench(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line when there is nothing to test, or requests failed in transport."""
    options = importlib.import_module("packhorse.bench.options").read_options(argv, environ)
    for library in ("aiohttp", *(("matplotlib",) if options.plot else ())):
        if importlib.util.find_spec(library) is None:
            raise BenchError(f"{library} is not installed; {_EXTRA}")
    status: int = importlib.import_module("packhorse.bench.command").run(options)
    return status
