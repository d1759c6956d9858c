"""JSON files of a model folder, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError


def read_json(path: Path) -> Any:
    """What the file holds. Raises ModelFilesError when it is missing, unreadable or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFilesError(f"{path} is missing") from None
    except OSError as problem:
        raise ModelFilesError(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError) as problem:
        raise ModelFilesError(f"{path} is not JSON: {problem}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that the file holds. Raises ModelFilesError as ``read_json``, and when it holds anything else."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ModelFilesError(f"{path} holds a {type(found).__name__} where an object is expected")
    return found


def typed(found: dict[str, Any], key: str, kind: type, default: Any, path: Path) -> Any:
    """``found[key]`` checked to be of ``kind``; ``default`` where it is absent or null. Raises ModelFilesError."""
    value = found.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelFilesError(f"{path}: {key} is {value!r}, expected {kind.__name__}")
    return value


def present(folder: Path, *names: str) -> tuple[Path, ...]:
    """Those of the named files that the folder has."""
    return tuple(folder / name for name in names if (folder / name).is_file())
