"""An environment in which this checkout runs with the interpreter at hand, whether Packhorse is installed in it or not.

Where it is not, importing this puts the source roots on the path: before anything of Packhorse's is imported, so import it
first. supervisord starts ``packhorse`` by name, which ``prepare_environment`` sees to. So a machine that has a torch of its own
needs no installation.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SOURCE_ROOTS = [str((ROOT / each).resolve()) for each in (".", "frontend", "broker", "worker", "shared")]
_COMMAND = """#!/bin/sh
exec "{python}" -c 'import sys; from packhorse.cli import main; sys.exit(main())' "$@"
"""

if importlib.util.find_spec("packhorse_shared") is None:
    sys.path[:0] = _SOURCE_ROOTS


def prepare_environment(folder: Path) -> None:
    """Change this process's environment, which its children inherit. ``folder`` is for the command; it must outlive them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if (Path(sys.executable).parent / "packhorse").exists():
        return
    command = folder / "bin" / "packhorse"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(_COMMAND.format(python=sys.executable), encoding="utf-8")
    command.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(command.parent), os.environ.get("PATH", os.defpath)])
    os.environ["PYTHONPATH"] = os.pathsep.join([*_SOURCE_ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])
