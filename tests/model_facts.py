"""What a worker tells of its model, for tests in which there is none."""

from __future__ import annotations

from typing import Any

from packhorse_shared.messages import ModelFacts

_FACTS: dict[str, Any] = {
    "name": "tiny",
    "task": "embedding",
    "dimension": 2,
    "max_seq_len": 64,
    "dtype": "float32",
    "vocabulary_rows": 128,
    "canary": (2, 3),
    "fingerprint": "f1",
}


def model_facts(**changes: Any) -> ModelFacts:
    """The facts of a small embedding model, with some of them changed."""
    return ModelFacts(**{**_FACTS, **changes})
