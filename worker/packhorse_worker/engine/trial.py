"""Stand-ins for packed layers, to try a model with before its weights are packed: afterwards there is no way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Opaque(nn.Module):
    """The outputs of linear layers side by side, as a packed layer gives them, behind a weight that nobody can compute with.

    A model that does so, instead of calling the layer, gets NaN.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        first = linears[0]
        self.in_features, self.out_features = first.in_features, sum(each.out_features for each in linears)
        nothing = torch.full((1, 1), torch.nan, dtype=first.weight.dtype, device=first.weight.device)
        self.weight = nothing.expand(self.out_features, self.in_features)  # takes no memory
        self.bias = first.bias if len(linears) == 1 else None
        self._linears = tuple(linears)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``values``: (..., in_features). Gives (..., out_features)."""
        return torch.cat([each(values) for each in self._linears], dim=-1)


class Swaps:
    """Modules that stand in for others until they are put back."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, nn.Module]] = []

    def put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace a child."""
        self._places.append((parent, name, getattr(parent, name)))
        setattr(parent, name, module)

    def undo(self) -> None:
        """Put all back."""
        while self._places:
            parent, name, module = self._places.pop()
            setattr(parent, name, module)
