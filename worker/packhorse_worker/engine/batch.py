"""One input on its way through the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Input:
    """The token ids of one input, and what comes with them."""

    ids: NDArray[np.int32]
    """Shape (tokens,)."""
    prompt_tokens: int = 0
    """Leading tokens that belong to a prompt: a model with ``include_prompt`` false leaves them out of its pooling."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors with one row per token, by the name of the forward argument that they are for (``token_type_ids``, ...)."""

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)
