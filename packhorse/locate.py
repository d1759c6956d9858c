"""Finding a running server: by ``--port`` or ``--run_dir``, or the only one that this user runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from packhorse_shared.arguments import Parser, add_option, parse
from packhorse_shared.environment import from_environment
from packhorse_shared.errors import CannotStartError
from packhorse_shared.run_dir import RunDir, find_running, run_dir_of

_WHICH = ("port", "run_dir")
_ONLY_ONE = "; by default the only one that this user runs"


def tool_parser(command: str, description: str, *, otherwise: str = _ONLY_ONE, **options: Any) -> Parser:
    """A parser for a tool that talks to a running server. ``otherwise`` says which one, when no flag names it."""
    parser = Parser(prog=f"packhorse {command}", description=description, **options)
    group = parser.add_argument_group("Which server")
    add_option(group, "port", f"the server of this user on this port{otherwise} (PACKHORSE_PORT)", metavar="N")
    add_option(group, "run_dir", "the server with this run directory (PACKHORSE_RUN_DIR)", metavar="PATH")
    return parser


def locate(parser: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, RunDir]:
    """Parse a tool's command line and find the server it means. Raises CannotStartError when there is none."""
    parsed, settings = parse(parser, argv, environ)
    xdg = environ.get("XDG_RUNTIME_DIR")
    if not names_a_server(parsed, environ):
        return parsed, find_running(xdg)
    run_dir = run_dir_of(settings.process, settings.http.port, xdg)
    if not run_dir.is_live():
        raise CannotStartError(f"no Packhorse runs in {run_dir.path}")
    return parsed, run_dir


def names_a_server(parsed: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Whether a flag or a variable says which server is meant. Kubernetes' PACKHORSE_PORT=tcp://... is no such variable."""
    in_environment = from_environment(environ)
    return any(getattr(parsed, name) is not None or name in in_environment for name in _WHICH)
