"""``packhorse scale N``: more or fewer workers, through supervisord; the others keep running untouched."""

from __future__ import annotations

from collections.abc import Mapping

from packhorse.control import Supervisor, set_worker_count
from packhorse.locate import locate, tool_parser
from packhorse_shared.errors import CannotStartError
from packhorse_shared.settings import MAX_PROCESSES


def scale(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line when it cannot be done."""
    parser = tool_parser("scale", "Set the number of workers of a running server.", usage="%(prog)s N [flags]")
    parser.add_argument("count", metavar="N", type=int, help=f"workers to run, from 0 to {MAX_PROCESSES}")
    parsed, run_dir = locate(parser, argv, environ)
    if not 0 <= parsed.count <= MAX_PROCESSES:
        parser.error(f"N: {parsed.count} is not allowed; give a whole number from 0 to {MAX_PROCESSES}")
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
