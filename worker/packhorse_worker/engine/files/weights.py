"""The weights files of a folder: which there are, whether they are whole, and a cheap fingerprint of what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from packhorse_shared.errors import ModelFilesError
from packhorse_worker.engine.files.json_file import read_object

_BLOCK_BYTES = 64 * 1024
_LONGEST_HEADER_BYTES = 100_000_000
"""Of the safetensors format."""
_LFS_MARK = b"version https://git-lfs"


def find_weights(folder: Path, *, allow_pickle: bool) -> tuple[Path, ...]:
    """The weights files of a transformer or Dense folder, safetensors first, each checked to be whole.

    Raises ModelFilesError naming the file that is missing, cut short, or a pickle that ``allow_pickle_weights`` does not
    allow.
    """
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_file():
            files = _listed(folder / name)
            for file in files:
                _check_safetensors(file)
            return files
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            if not allow_pickle:
                raise ModelFilesError(
                    f"{folder / name} is a pickle, which can run code, and there is no model.safetensors beside it; "
                    "--allow_pickle_weights loads it"
                )
            return _listed(folder / name)
    raise ModelFilesError(f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json")


def fingerprint(files: Iterable[Path], weights: Iterable[Path], facts: Iterable[str]) -> str:
    """Hex digest of the configuration files' contents, the weights' names, sizes and sampled blocks, and the given facts.

    Sampled (first, middle and last 64 KiB), so that gigabytes are not read twice; a safetensors header is in the first.
    """
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in (0, size // 2, max(0, size - _BLOCK_BYTES)):
                file.seek(offset)
                digest.update(file.read(_BLOCK_BYTES))
    for fact in facts:
        digest.update(f"{fact}\0".encode())
    return digest.hexdigest()


def _listed(path: Path) -> tuple[Path, ...]:
    """The file itself, or the shards that an index names."""
    if path.suffix != ".json":
        return (path,)
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFilesError(f"{path} has no weight_map")
    shards = tuple(path.parent / str(name) for name in sorted({*weight_map.values()}))
    for shard in shards:
        if shard.parent != path.parent or not shard.is_file():
            raise ModelFilesError(f"{shard} is missing; {path.name} names it")
    return shards


def _check_safetensors(path: Path) -> None:
    """Raise ModelFilesError unless the file has the size that its header says.

    Format: 8 bytes of header length, a JSON header with ``data_offsets`` of each tensor, the data
    (https://github.com/huggingface/safetensors#format).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_MARK))
        if start == _LFS_MARK:
            raise ModelFilesError(f"{path} is a Git LFS pointer, not the weights; fetch them with git lfs pull")
        file.seek(8)
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
            raise ModelFilesError(f"{path} is not a whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            declared = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise ModelFilesError(f"{path} has a broken safetensors header") from None
    if size < declared:
        raise ModelFilesError(f"{path} is cut short: {size} bytes, its header says {declared}")
