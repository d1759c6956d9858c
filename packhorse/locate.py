"""Finding a running server: by ``--port`` or ``--run_dir``, or the only one that this user runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from packhorse_shared.arguments import Parser, add_settings, parse
from packhorse_shared.errors import CannotStartError
from packhorse_shared.run_dir import RunDir, find_running, run_dir_of

_WHICH = ("port", "run_dir")


def tool_parser(command: str, description: str, **options: Any) -> Parser:
    """A parser for a tool that talks to a running server."""
    parser = Parser(prog=f"packhorse {command}", description=description, **options)
    add_settings(parser, names=_WHICH)
    return parser


def locate(parser: argparse.ArgumentParser, argv: list[str], environ: Mapping[str, str]) -> tuple[argparse.Namespace, RunDir]:
    """Parse a tool's command line and find the server it means. Raises CannotStartError when there is none."""
    parsed, settings = parse(parser, argv, environ)
    xdg = environ.get("XDG_RUNTIME_DIR")
    is_named = any(getattr(parsed, name) is not None for name in _WHICH)
    if not is_named and not any(f"PACKHORSE_{name.upper()}" in environ for name in _WHICH):
        return parsed, find_running(xdg)
    run_dir = run_dir_of(settings.process, settings.http.port, xdg)
    if not run_dir.is_live():
        raise CannotStartError(f"no Packhorse runs in {run_dir.path}")
    return parsed, run_dir
