"""What a way to compute attention over packed inputs is, and what a forward tells it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray

from packhorse_worker.engine.packing import Layout, Shape

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""


class Pattern(NamedTuple):
    """What one layer asks of attention."""

    scale: float
    """Of the products of query and key."""
    causal: bool
    """Whether a token sees only itself and what stands before it."""
    window: int | None
    """Keeps pairs less than so many tokens apart."""


class Way(Protocol):
    """Computes attention of each input to itself."""

    name: str
    """For logs, in a word or a few."""
    is_graphable: bool
    """Whether ``attend`` reads tensors only, on their device, so that a CUDA graph can hold it."""

    def arrays(self, layout: Layout, shape: Shape) -> dict[str, NDArray[Any]]:
        """What ``attend`` reads on the device besides its arguments, by name; the names begin with ``attention_``.

        Their shapes and dtypes follow from ``shape`` alone. ``layout`` has at most ``shape.batch_size`` inputs, none of them
        longer than ``shape.seq_len``, and together at most ``shape.num_tokens`` tokens.
        """

    def attend(self, tensors: Tensors, scope: Scope, pattern: Pattern) -> torch.Tensor:
        """Attention of each input to itself.

        ``tensors``: query of shape (1, heads, rows, head size); key and value of (1, key-value heads, rows, head size). Returns
        (1, rows, heads, head size). Rows that belong to no input may hold anything, not-a-number included, and reach no
        other row; in what is returned they may hold anything, too.

        Raises NotImplementedError for what it cannot compute.
        """


@dataclass(frozen=True)
class Scope:
    """One forward, as its attention layers see it."""

    way: Way
    shape: Shape
    tensors: Mapping[str, torch.Tensor]
    """``Way.arrays`` on the device; there may be others among them."""
    layout: Layout | None
    """Where the inputs lie; None while a graph is captured, which must serve every layout of its shape."""
    windows: set[int] = field(default_factory=set)
    """Every ``sliding_window`` that a layer asked for."""
    kept: dict[Hashable, Any] = field(default_factory=dict)
    """What a way's first layer made for all of them."""


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """(1, key-value heads, rows, head size) with every head as often as query heads share it."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def check_fits(layout: Layout, shape: Shape) -> None:
    """Assert that a shape is large enough for a layout: beyond it, indexes would point at what is no input's."""
    assert len(layout.lengths) <= shape.batch_size, (layout.lengths, shape)
    assert layout.tokens <= shape.num_tokens, (layout.lengths, shape)
    assert layout.longest <= shape.seq_len, (layout.lengths, shape)
