"""The ``packhorse`` command. Each command is imported when it is named: none pays for another's libraries."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from packhorse_shared import __version__
from packhorse_shared.arguments import EXIT_USAGE
from packhorse_shared.environment import SUPERVISED
from packhorse_shared.errors import EXIT_CANNOT_START, PackhorseError
from packhorse_shared.lifetime import die_with_parent
from packhorse_shared.load import did_you_mean

_HELP = """\
usage: packhorse COMMAND [flags]

Serve encoder models behind one OpenAI-compatible endpoint.

  packhorse embeddings [MODEL]   start a server; Ctrl-C drains and stops it
  packhorse status [--json]      queue, workers and rates of a running server
  packhorse bench [URL]          load test of a running server
  packhorse scale N              run N workers, the others stay untouched
  packhorse worker               one more worker for a running server
  packhorse keys FOLDER NAME...  keys for workers of other machines
  packhorse conf                 print where the shipped supervisord.conf is
  packhorse --version

What supervisord runs, one process each: packhorse broker | worker | frontend.
`packhorse COMMAND --help` lists a command's flags.
"""

_ROLES = ("broker", "worker", "frontend")
"""Commands that are packages of their own: ``packhorse_<name>.__main__.main(argv)``."""
_TOOLS = ("embeddings", "status", "bench", "scale", "keys", "conf", "slots")
"""Commands of this package: module (or package) and function are both called like the command."""

Command = Callable[[list[str], Mapping[str, str]], int]
Role = Callable[[list[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_HELP, end="")
        return 0 if words else EXIT_USAGE
    name, rest = words[0], words[1:]
    if name in {"--version", "-V"}:
        print(f"packhorse {__version__}")
        return 0
    if name not in _ROLES and name not in _TOOLS:
        near = did_you_mean(name, (*_ROLES, *_TOOLS))
        print(f"packhorse: unknown command {name}{near} (see packhorse --help)", file=sys.stderr)
        return EXIT_USAGE
    try:
        return _run(name, rest, os.environ)
    except PackhorseError as problem:
        print(f"packhorse {name}: {problem}", file=sys.stderr)
        return EXIT_CANNOT_START if name in _ROLES else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(name: str, argv: list[str], environ: Mapping[str, str]) -> int:
    if SUPERVISED in environ and name in (*_ROLES, "slots"):
        _end_with_supervisord()
    if name in _ROLES:
        role: Role = importlib.import_module(f"packhorse_{name}.__main__").main
        return role(argv)
    command: Command = getattr(importlib.import_module(f"packhorse.{name}"), name)
    return command(argv, environ)


def _end_with_supervisord() -> None:
    """Die with supervisord. If it died before this could be arranged, the parent by now is another process: end at once."""
    parent = os.getppid()
    die_with_parent(parent)
    try:
        command_line = Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return
    if b"supervisord" not in command_line:
        raise SystemExit(EXIT_CANNOT_START)
