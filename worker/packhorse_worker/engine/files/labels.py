"""The labels of a classifier, as its config.json names them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packhorse_shared.errors import ModelFilesError
from packhorse_shared.messages import MAX_LABELS
from packhorse_worker.engine.files.json_file import typed

log = logging.getLogger(__name__)

_DEFAULT_LABELS = 2
"""Of transformers, for a config.json that says nothing."""
_MOST_LABELS = 1 << 20
_MOST_TOLD_BYTES = 16 * 1024
_LONGEST_TOLD_CHARS = 256
"""The labels travel in the header of every state that the broker tells its frontends, four times a second."""


def read_labels(config: dict[str, Any], changes: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The labels in the order of the logits: ``id2label``, else as many numbered ones as ``num_labels``, else two.

    ``changes``: what the model's files put over its config.json; a ``num_labels`` there that differs makes numbered labels, as
    in transformers. Raises ModelFilesError naming ``path`` when the numbers of ``id2label`` are not 0, 1, 2 and so on.
    """
    declared = typed(config, "id2label", dict, None, path)
    count = typed(config, "num_labels", int, _DEFAULT_LABELS, path)
    labels = numbered(count, path) if declared is None else _ordered(declared, path)
    changed = typed(dict(changes), "num_labels", int, len(labels), path)
    return labels if changed == len(labels) else numbered(changed, path)


def numbered(count: int, path: Path) -> tuple[str, ...]:
    """As many labels without names of their own. Raises ModelFilesError unless there is at least one."""
    if not 1 <= count <= _MOST_LABELS:
        raise ModelFilesError(f"{path}: {count} labels, expected 1 to {_MOST_LABELS}")
    return tuple(f"LABEL_{number}" for number in range(count))


def told(labels: tuple[str, ...]) -> tuple[str, ...]:
    """The labels as ``ModelFacts`` may have them: all, or none where they are too many or too long, which a warning tells."""
    size = sum(len(label.encode("utf-8", "replace")) for label in labels)
    longest = max(map(len, labels), default=0)
    if len(labels) <= MAX_LABELS and size <= _MOST_TOLD_BYTES and longest <= _LONGEST_TOLD_CHARS:
        return labels
    log.warning(
        "the labels in config.json are too many or too long to be told; their numbers stand for them",
        extra={"labels": len(labels), "bytes": size, "most_bytes": _MOST_TOLD_BYTES, "longest_characters": longest},
    )
    return ()


def _ordered(declared: dict[str, Any], path: Path) -> tuple[str, ...]:
    try:
        by_number = {int(number): str(label) for number, label in declared.items()}
    except ValueError:
        raise ModelFilesError(f"{path}: id2label has keys that are not numbers") from None
    if sorted(by_number) != list(range(len(declared))) or not declared:
        raise ModelFilesError(f"{path}: id2label does not number its {len(declared)} labels from 0 on without a gap")
    return tuple(by_number[number] for number in range(len(by_number)))
