"""``packhorse conf``: where the shipped supervisord.conf is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packhorse_shared.arguments import Parser

_NAME = "supervisord.conf"


def conf(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command."""
    Parser(prog="packhorse conf", description="Print where the shipped supervisord.conf is.").parse_args(argv)
    print(conf_path())
    return 0


def conf_path() -> Path:
    """The shipped supervisord.conf: beside this module in an installed wheel, at the root of a checkout."""
    here = Path(__file__).resolve().parent
    shipped = here / _NAME
    return shipped if shipped.is_file() else here.parent / _NAME
