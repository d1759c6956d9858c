"""Attention by SDPA over a rectangle of (inputs, tokens of the longest), with what lies behind an input's end masked.

For graphs where no kernel for many lengths works, as in float32: everything that depends on the lengths is an index or a mask
on the device. Every input costs as much as the longest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from packhorse_worker.engine.attention.way import Pattern, Scope, Tensors, check_fits, repeated
from packhorse_worker.engine.packing import Layout, Shape


class Rectangle:
    """See the module."""

    name = "SDPA over a rectangle"
    is_graphable = True

    def arrays(self, layout: Layout, shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Way``. All int64.

        ``attention_cells``, (tokens,): where in the rectangle a row lies, cells counted input by input; 0 for rows of no input.
        ``attention_corners``, (batch size x longest,): the row that a cell holds. Behind an input's end that is its own first
        one, so that nothing foreign comes in: masked or not, not-a-number would spread.
        ``attention_lengths``, (batch size,); 1 for a slot without an input, whose cells nobody reads.
        """
        count = len(layout.lengths)
        check_fits(layout, shape)
        lengths = np.ones(shape.batch_size, dtype=np.int64)
        lengths[:count] = layout.sizes
        starts = np.zeros(shape.batch_size, dtype=np.int64)
        starts[:count] = layout.starts
        column = np.arange(shape.seq_len)
        is_real = column < lengths[:, None]
        corners = starts[:, None] + column * is_real
        cells = np.zeros(shape.num_tokens, dtype=np.int64)
        cells[: layout.tokens] = np.flatnonzero(is_real[:count])
        return {"attention_cells": cells, "attention_corners": corners.ravel(), "attention_lengths": lengths}

    def attend(self, tensors: Tensors, scope: Scope, pattern: Pattern) -> torch.Tensor:
        """See ``Way``."""
        heads = tensors[0].shape[1]
        q, k, v = (_in_rectangle(repeated(each, heads), scope) for each in tensors)
        mask = _mask(scope, pattern)
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=pattern.scale)
        return output.transpose(1, 2).flatten(0, 1).index_select(0, scope.tensors["attention_cells"]).unsqueeze(0)


def _in_rectangle(tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
    """(1, heads, rows, head size) as (inputs, heads, tokens of the longest, head size)."""
    cells = tensor.squeeze(0).transpose(0, 1).index_select(0, scope.tensors["attention_corners"])
    return cells.view(scope.shape.batch_size, scope.shape.seq_len, *cells.shape[1:]).transpose(1, 2)


def _mask(scope: Scope, pattern: Pattern) -> torch.Tensor:
    """Which token sees which, (inputs, 1, 1 or longest, longest); made by the first layer that asks.

    Every token of an input sees itself. Cells behind an input's end may see nothing, and nobody reads them.
    """
    kind = (pattern.causal, pattern.window)
    if kind not in scope.kept:
        lengths = scope.tensors["attention_lengths"]
        place = torch.arange(scope.shape.seq_len, device=lengths.device)
        mask = (place < lengths.view(-1, 1)).view(-1, 1, 1, len(place))
        distance = place.view(-1, 1) - place
        if pattern.causal:
            mask = mask & (distance >= 0)
        if pattern.window is not None:
            mask = mask & (distance.abs() < pattern.window)
        scope.kept[kind] = mask
    made: torch.Tensor = scope.kept[kind]
    return made
