"""Query, key and value projections as one linear layer: for a short text most of a small product's time is its call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

PROJECTIONS = (
    ("query", "key", "value"),  # BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ALBERT
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("q_proj", "k_proj", "v_proj"),  # NomicBERT, Jina v3, EuroBERT, Qwen, Llama, Mistral, Gemma
    ("q", "k", "v"),  # MPNet, T5
)


def joined_linear(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer that gives the outputs of these, which read the same input, side by side."""
    first, outputs = linears[0], sum(each.out_features for each in linears)
    joined = nn.Linear(first.in_features, outputs, bias=first.bias is not None, device="meta")  # which draws no random numbers
    joined.weight = nn.Parameter(torch.cat([each.weight.detach() for each in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([each.bias.detach() for each in linears]), requires_grad=False)
    return joined


class _Joined:
    """The layer and what it made last, until every part has been taken."""

    def __init__(self, layer: nn.Module, sizes: list[int]) -> None:
        self.layer = layer
        self.sizes = sizes
        self.calls = 0
        self._values: weakref.ref[torch.Tensor] | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._taken: set[int] = set()

    def part(self, values: torch.Tensor, index: int) -> torch.Tensor:
        if self._values is None or values is not self._values() or index in self._taken:
            self.calls += 1
            self._values, self._taken = weakref.ref(values, self._drop), set()
            self._outputs = torch.split(self.layer(values), self.sizes, dim=-1)
        output = self._outputs[index]
        self._taken.add(index)
        if len(self._taken) == len(self.sizes):
            self._values, self._outputs, self._taken = None, (), set()
        return output

    def _drop(self, values: weakref.ref[torch.Tensor]) -> None:
        """Their input is gone, after an error: nobody will ask for the other outputs."""
        if values is self._values:
            self._values, self._outputs, self._taken = None, (), set()


class JoinedPart(nn.Module):
    """One of the projections: a view of the columns that are its own, computed when the first one is asked for."""

    def __init__(self, joined: _Joined, index: int, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.layer = joined.layer  # so that the model's modules hold it
        self.joined = joined
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight of the whole layer: some models look at its dtype."""
        weight = self.layer.weight
        assert isinstance(weight, torch.Tensor), type(weight)
        return weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``values``: (..., in_features), the same tensor for all parts. Gives (..., out_features)."""
        return self.joined.part(values, self._index)

    def extra_repr(self) -> str:
        """As ``nn.Linear`` has it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, part={self._index}"


def parts_of(layer: nn.Module, linears: Sequence[nn.Linear]) -> list[JoinedPart]:
    """What takes the place of each layer, once ``layer`` computes them all."""
    joined = _Joined(layer, [each.out_features for each in linears])
    return [JoinedPart(joined, index, each) for index, each in enumerate(linears)]
