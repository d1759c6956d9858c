"""How many values the output of an input has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse_shared.messages import ModelFacts

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RowShape:
    """How many values the row of an input has."""

    dimension: int
    per_token: bool = False
    """Whether it has ``dimension`` values for each of its tokens."""

    def values(self, tokens: int) -> int:
        """Values of the row of an input with so many tokens."""
        return self.dimension * tokens if self.per_token else self.dimension

    def values_of_all(self, lengths: Sequence[int]) -> int:
        """Values of the rows of inputs of these lengths."""
        return self.dimension * (sum(lengths) if self.per_token else len(lengths))


def shape_of(model: ModelFacts) -> RowShape:
    """The shape of this model's rows."""
    return RowShape(model.dimension, per_token=model.task == "token_reward")
