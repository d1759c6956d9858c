"""Whether the files that settings name are there."""

from __future__ import annotations

import stat
from pathlib import Path

from packhorse_shared.errors import SettingsError
from packhorse_shared.values import shortened


def find_file(label: str, text: str) -> Path:
    """The regular file of that path, ``~`` included. Raises SettingsError that says what is there instead.

    ``label`` names the setting.
    """
    shown = shortened(text)
    try:
        path = Path(text).expanduser()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise SettingsError(label, f"there is no file {shown}") from None
    except OSError as problem:
        raise SettingsError(label, f"{shown} cannot be read: {problem.strerror}") from None
    except (RuntimeError, ValueError) as problem:  # a home folder of nobody; a path with a NUL
        raise SettingsError(label, f"{shown} is no path: {problem}") from None
    if stat.S_ISDIR(mode):
        raise SettingsError(label, f"{shown} is a folder, not a file")
    if not stat.S_ISREG(mode):
        raise SettingsError(label, f"{shown} is no regular file")
    return path
