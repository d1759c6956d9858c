"""``packhorse keys``: CURVE keys for workers that join from other machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from packhorse_shared.arguments import Parser
from packhorse_shared.key_folders import ALLOWED, BROKER, make_keys

_DESCRIPTION = f"""Make CURVE keys for workers of other machines: FOLDER/{BROKER} for the server's broker, and FOLDER/NAME for
each machine, to be copied there. Run again with new NAMEs it adds machines and leaves the rest as it is."""


def keys(argv: list[str], _environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line, before anything is made, when a NAME cannot be used."""
    parser = Parser(prog="packhorse keys", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="private folder of all keys, made if it is missing")
    parser.add_argument("names", metavar="NAME", nargs="+", help="of a machine: letters, digits, - and _")
    parsed = parser.parse_args(argv)
    folder, names = parsed.folder.expanduser().absolute(), parsed.names
    make_keys(folder, names)
    print(f"made {', '.join(str(folder / name) for name in names)}; copy each to its machine, over ssh, and keep no copy here")
    print(f"start the server with --broker tcp://*:PORT --curve_keys {folder / BROKER}")
    print("start workers with packhorse worker --broker tcp://SERVER:PORT --curve_keys NAME")
    print(f"to take a key away, delete its file in {folder / BROKER / ALLOWED}")
    return 0
