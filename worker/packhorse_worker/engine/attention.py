"""Attention over packed inputs, as an attention implementation of transformers.

transformers lets a model's attention be replaced by name (``AttentionInterface``). Under this name there is no mask function,
so models build no mask at all; where an input begins and ends is told by ``attend_within`` and not by arguments, which some
models drop on the way. Nothing of an input can reach another: each is attended to by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from packhorse_worker.engine.batched_attention import NARROWEST_ALONE, Chunk, Shape, attend, plan, step_of
from packhorse_worker.engine.packing import Layout, Run

IMPLEMENTATION = "packhorse_packed"
"""The name that a model's config says when its attention is this one."""

_UNSUPPORTED = ("position_bias", "softcap", "s_aux")
"""Arguments that would change the result and are not followed here: a relative bias, a soft cap, attention sinks."""


class _Scope:
    """The layout of one forward, and what its layers have in common."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.is_single = len(layout.lengths) == 1 and layout.longest <= NARROWEST_ALONE
        self.windows: set[int] = set()
        """Every ``sliding_window`` that a layer asked for."""
        self._plans: dict[Shape, list[Chunk | Run]] = {}

    def plan(self, shape: Shape) -> list[Chunk | Run]:
        """How a CPU attends to the layout; made by the first layer that asks."""
        if shape not in self._plans:
            self._plans[shape] = plan(self.layout, shape)
        return self._plans[shape]


_scope: ContextVar[_Scope] = ContextVar("scope")


@contextmanager
def attend_within(layout: Layout) -> Iterator[set[int]]:
    """Within this context, and in this thread, packed attention keeps to the inputs of ``layout``.

    Gives the sliding windows that layers ask for, as they do.
    """
    scope = _Scope(layout)
    token = _scope.set(scope)
    try:
        yield scope.windows
    finally:
        _scope.reset(token)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each input of the layout to itself; zeros for filler behind them.

    ``query``: (1, heads, rows, head size); ``key`` and ``value``: (1, key-value heads, rows, head size). Returns
    (1, rows, heads, head size) and no weights. ``sliding_window`` w keeps pairs less than w apart. Raises
    NotImplementedError for what it cannot honour.
    """
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}")
    if attention_mask is not None or query.shape[0] != 1:
        raise NotImplementedError("packed attention takes neither a mask nor a batch dimension")
    scope = _scope.get()
    if sliding_window is not None:
        scope.windows.add(sliding_window)
    if key.shape[1] != query.shape[1]:
        key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    in_window = sliding_window is None or scope.layout.longest <= sliding_window
    if in_window and scope.is_single and scope.layout.tokens == query.shape[2]:
        alone = functional.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=causal)
        return alone.transpose(1, 2), None
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    output[:, scope.layout.tokens :] = 0
    tensors = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if causal or not in_window or query.device.type != "cpu":
        parts: Sequence[Chunk | Run] = scope.layout.runs
    else:
        step = step_of(tensors)
        if step is None:
            tensors = (tensors[0].contiguous(), tensors[1].contiguous(), tensors[2].contiguous())
        parts = scope.plan(Shape(query.shape[1], step or query.shape[1], query.dtype))
    for part in parts:
        if isinstance(part, Chunk):
            attend(part, tensors, output[0], scale)
        else:
            _attend_run(part, tensors, output[0], scale, window=sliding_window, causal=causal)
    return output, None


def use_packed_attention(model: Any) -> str | None:
    """Make ``packed_attention`` the model's attention; returns the name of the one before, for ``use_attention``.

    None, and nothing changed, where the model does not allow that: transformers only warns about a model that computes
    attention in its own way, so its config is looked at afterwards.
    """
    before: str = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation == IMPLEMENTATION:
        return before
    model.set_attn_implementation(before)
    return None


def use_attention(model: Any, implementation: str) -> None:
    """Make another implementation the model's attention again."""
    model.set_attn_implementation(implementation)


def _attend_run(
    run: Run,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    into: torch.Tensor,
    scale: float,
    *,
    window: int | None,
    causal: bool,
) -> None:
    """Attention of a run's inputs. All tensors are of shape (rows, heads, head size); those of a run are views of them."""
    q, k, v, into = (
        each[run.start : run.end].view(run.inputs, run.length, *each.shape[1:]).transpose(1, 2) for each in (*tensors, into)
    )
    if window is None or run.length <= window:
        into.copy_(functional.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=causal))
    else:
        _attend_in_window(into, q, k, v, scale=scale, window=window, causal=causal)


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Every key-value head as often as query heads share it."""
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)


def _attend_in_window(
    into: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int,
    causal: bool,
) -> None:
    """Attention to tokens less than ``window`` apart, in blocks of queries: an input's cost grows with its length, not with
    the square of it."""
    length = query.shape[2]
    step = max(window, _FEWEST_QUERIES)
    for first in range(0, length, step):
        last = min(first + step, length)
        left, right = max(0, first - window + 1), last if causal else min(length, last + window - 1)
        distance = torch.arange(first, last, device=query.device)[:, None] - torch.arange(left, right, device=query.device)
        mask = (distance < window) & (distance >= 0 if causal else distance > -window)
        into[:, :, first:last] = functional.scaled_dot_product_attention(
            query[:, :, first:last], key[:, :, left:right], value[:, :, left:right], attn_mask=mask, scale=scale
        )


_FEWEST_QUERIES = 128
"""Narrower blocks would cost more in calls than they save."""

AttentionInterface.register(IMPLEMENTATION, packed_attention)
