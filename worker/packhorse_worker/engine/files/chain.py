"""``modules.json``: the transformer of a sentence-transformers folder, and what stands behind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.files.json_file import present, read_json
from packhorse_worker.engine.files.modules import LogitScore, Part, read_part


@dataclass(frozen=True)
class Chain:
    """What modules.json lists, in order."""

    path: Path
    transformer: Path
    """Folder of the transformer: that of modules.json or one below it."""
    parts: tuple[Part | LogitScore, ...]
    """What follows the transformer."""
    files: tuple[Path, ...]
    """modules.json and the parts' own configurations."""


def read_chain(path: Path) -> Chain:
    """What modules.json at ``path`` lists. Raises ModelFilesError naming the file that is missing or cannot be served."""
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ModelFilesError(f"{path} is not a list of modules")
    transformer: Path | None = None
    parts: list[Part | LogitScore] = []
    files = [path]
    for number, entry in enumerate(entries):
        kind, folder = _read_entry(entry, path)
        if number == 0 and kind == "Transformer":
            transformer = folder
            continue
        try:
            part = read_part(kind, folder)
        except KeyError:
            raise ModelFilesError(f"{path}: module {number} is a {entry['type']}, which is not served") from None
        files += present(folder, "config.json")
        if part is not None:
            parts.append(part)
    if transformer is None:
        raise ModelFilesError(f"{path}: the first module is a {entries[0]['type']}; only a Transformer is served there")
    return Chain(path, transformer, tuple(parts), tuple(files))


def _read_entry(entry: Any, path: Path) -> tuple[str, Path]:
    """Class name and folder of one entry of modules.json."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str) or not isinstance(entry.get("path"), str):
        raise ModelFilesError(f"{path}: an entry without type and path: {str(entry)[:80]}")
    kind: str = entry["type"]
    if not kind.startswith("sentence_transformers."):
        raise ModelFilesError(f"{path}: module type {kind} is the model's own code, which is not served")
    folder = (path.parent / entry["path"]).absolute()
    if ".." in Path(entry["path"]).parts or not folder.is_relative_to(path.parent.absolute()):
        raise ModelFilesError(f"{path}: path {entry['path']} leads out of the model folder")
    return kind.rpartition(".")[2], folder
