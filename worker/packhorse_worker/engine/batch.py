"""One input on its way through the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_shared.extra_inputs import Symbol


@dataclass(frozen=True, eq=False)
class Extra:
    """What one input has of a tensor that is handed to the transformer."""

    rows: torch.Tensor
    axis: int = 0
    """The axis along which inputs are joined; every other one is as long for all inputs."""
    per: Symbol = "num_tokens"
    """What that axis counts: it is as long as the input has tokens, or 1."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether it has a row for each token, like the transformer's own inputs."""
        return self.axis == 0 and self.per == "num_tokens"

    @classmethod
    def of_tokens(cls, rows: torch.Tensor) -> Self:
        """A row for each token."""
        return cls(rows)


@dataclass(frozen=True, eq=False)
class Input:
    """The token ids of one input, and what comes with them."""

    ids: NDArray[np.int32]
    """Shape (tokens,)."""
    prompt_tokens: int = 0
    """Leading tokens that belong to a prompt: a model with ``include_prompt`` false leaves them out of its pooling."""
    extras: Mapping[str, Extra] = field(default_factory=dict)
    """Tensors by the name of the forward argument that they are for (``token_type_ids``, ...)."""

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)
