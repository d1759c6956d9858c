"""``LLM``: ``Encoder`` under the name that code written for TensorRT-LLM uses."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from packhorse_worker.engine.api.encoder import Encoder

_NO_GENERATION = "the model was loaded with encode_only=True, which has no text generation; use encode"


class LLM(Encoder):
    """``LLM(model, encode_only=True)`` is ``Encoder(model)``, and takes the same settings."""

    def __init__(self, model: str | os.PathLike[str] | None = None, *, encode_only: bool = False, **settings: Any) -> None:
        if encode_only is not True:
            raise ValueError("Packhorse encodes only and generates no text: say LLM(model, encode_only=True)")
        super().__init__(model, **settings)

    def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Not here. Raises RuntimeError."""
        raise RuntimeError(_NO_GENERATION)

    def generate_async(self, *_: Any, **__: Any) -> NoReturn:
        """Not here. Raises RuntimeError."""
        raise RuntimeError(_NO_GENERATION)
