"""Attention by SDPA, one call for each run of inputs of equal length; on a CPU also as batched matrix products.

It needs the layout on the host, so no graph can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

from packhorse_worker.engine.attention.batched import NARROWEST_ALONE, Chunk, Heads, attend, plan, step_of
from packhorse_worker.engine.attention.way import Pattern, Scope, Tensors, repeated
from packhorse_worker.engine.packing import Layout, Run, Shape

_FEWEST_QUERIES = 128
"""Narrower blocks would cost more in calls than they save."""


class ByRuns:
    """See the module; works on every device, in every dtype, and leaves zeros in rows of no input."""

    name = "SDPA"
    is_graphable = False

    def arrays(self, layout: Layout, shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Way``."""
        return {}

    def attend(self, tensors: Tensors, scope: Scope, pattern: Pattern) -> torch.Tensor:
        """See ``Way``."""
        layout = scope.layout
        assert layout is not None, "the layout is read on the host"
        query, key, value = tensors
        if key.shape[1] != query.shape[1]:
            key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
        scale, causal, window = pattern
        first = layout.lengths[0]
        is_alone = len(layout.lengths) == 1 and first == query.shape[2] and first <= NARROWEST_ALONE
        if is_alone and (window is None or first <= window):
            alone = functional.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=causal)
            return alone.transpose(1, 2)
        in_window = window is None or layout.longest <= window
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        output[:, layout.tokens :] = 0
        rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
        if causal or not in_window or query.device.type != "cpu":
            parts: Sequence[Chunk | Run] = layout.runs
        else:
            step = step_of(rows)
            if step is None:
                rows = (rows[0].contiguous(), rows[1].contiguous(), rows[2].contiguous())
            parts = _plan(scope, layout, Heads(query.shape[1], step or query.shape[1], query.dtype))
        for part in parts:
            if isinstance(part, Chunk):
                attend(part, rows, output[0], scale)
            else:
                _attend_run(part, rows, output[0], pattern)
        return output


def _plan(scope: Scope, layout: Layout, heads: Heads) -> list[Chunk | Run]:
    """How a CPU attends to the layout; made by the first layer that asks."""
    if heads not in scope.kept:
        scope.kept[heads] = plan(layout, heads)
    parts: list[Chunk | Run] = scope.kept[heads]
    return parts


def _attend_run(run: Run, tensors: Tensors, into: torch.Tensor, pattern: Pattern) -> None:
    """Attention of a run's inputs. All tensors are of shape (rows, heads, head size); those of a run are views of them."""
    q, k, v, into = (
        each[run.start : run.end].view(run.inputs, run.length, *each.shape[1:]).transpose(1, 2) for each in (*tensors, into)
    )
    if pattern.window is None or run.length <= pattern.window:
        into.copy_(functional.scaled_dot_product_attention(q, k, v, scale=pattern.scale, is_causal=pattern.causal))
    else:
        _attend_in_window(into, (q, k, v), pattern, pattern.window)


def _attend_in_window(into: torch.Tensor, tensors: Tensors, pattern: Pattern, window: int) -> None:
    """Attention to tokens less than ``window`` apart, in blocks of queries: an input's cost grows with its length, not with
    the square of it."""
    query, key, value = tensors
    length, causal = query.shape[2], pattern.causal
    step = max(window, _FEWEST_QUERIES)
    for first in range(0, length, step):
        last = min(first + step, length)
        left, right = max(0, first - window + 1), last if causal else min(length, last + window - 1)
        distance = torch.arange(first, last, device=query.device)[:, None] - torch.arange(left, right, device=query.device)
        mask = (distance < window) & (distance >= 0 if causal else distance > -window)
        into[:, :, first:last] = functional.scaled_dot_product_attention(
            query[:, :, first:last], key[:, :, left:right], value[:, :, left:right], attn_mask=mask, scale=pattern.scale
        )
