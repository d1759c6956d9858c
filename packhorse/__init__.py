"""Packhorse: encoder models behind one OpenAI-compatible endpoint that uses every GPU of the machine.

In Python, ``Encoder`` runs such a model in the calling process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packhorse_shared.errors import ModelFilesError
    from packhorse_shared.graph_config import EncodeCudaGraphConfig, EncodeExtraInputSpec
    from packhorse_worker.engine.api.encoder import Encoder
    from packhorse_worker.engine.api.llm import LLM
    from packhorse_worker.engine.api.output import EncodeError, EncoderOutput

__all__ = [
    "LLM",
    "EncodeCudaGraphConfig",
    "EncodeError",
    "EncodeExtraInputSpec",
    "Encoder",
    "EncoderOutput",
    "ModelFilesError",
]

_HOMES = {
    "EncodeCudaGraphConfig": "packhorse_shared.graph_config",
    "EncodeExtraInputSpec": "packhorse_shared.graph_config",
    "EncodeError": "packhorse_worker.engine.api.output",
    "Encoder": "packhorse_worker.engine.api.encoder",
    "EncoderOutput": "packhorse_worker.engine.api.output",
    "LLM": "packhorse_worker.engine.api.llm",
    "ModelFilesError": "packhorse_shared.errors",
}
"""Imported when they are asked for: torch takes seconds, and the command line does without."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
