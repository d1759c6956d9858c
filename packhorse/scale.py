"""``packhorse scale N``: more or fewer workers, through supervisord; the others keep running untouched."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from packhorse.control import Supervisor, set_worker_count
from packhorse.locate import locate, tool_parser
from packhorse_shared.errors import CannotStartError
from packhorse_shared.settings import MAX_PROCESSES

_WHOLE_NUMBER = re.compile(r"\d{1,6}", re.ASCII)


def scale(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line when it cannot be done."""
    parser = tool_parser("scale", "Set the number of workers of a running server.", usage="%(prog)s N [flags]")
    parser.add_argument("count", metavar="N", type=_count, help=f"workers to run, from 0 to {MAX_PROCESSES}")
    parsed, run_dir = locate(parser, argv, environ)
    url = run_dir.read_server().supervisor_url
    if url is None:
        raise CannotStartError(
            f"the server in {run_dir.path} does not run under supervisord; start workers with packhorse worker"
        )
    started, stopped = set_worker_count(Supervisor(url), parsed.count)
    for verb, names in (("started", started), ("stopping", stopped)):
        if names:
            print(f"{verb} {', '.join(names)}")
    if not started and not stopped:
        print(f"{parsed.count} workers run already")
    return 0


def _count(word: str) -> int:
    """N, for argparse."""
    count = int(word) if _WHOLE_NUMBER.fullmatch(word) else -1
    if not 0 <= count <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{word!r} is not allowed; give a whole number from 0 to {MAX_PROCESSES}")
    return count
