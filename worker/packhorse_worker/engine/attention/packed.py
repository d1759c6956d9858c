"""Attention over packed inputs, as an attention implementation of transformers.

transformers lets a model's attention be replaced by name (``AttentionInterface``). Under this name there is no mask function,
so models build no mask at all; where an input begins and ends is told by ``attend_within`` and not by arguments, which some
models drop on the way. Nothing of an input can reach another: each is attended to by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from packhorse_worker.engine.attention.way import Pattern, Scope, Way
from packhorse_worker.engine.packing import Layout, Shape

IMPLEMENTATION = "packhorse_packed"
"""The name that a model's config says when its attention is this one."""

_UNSUPPORTED = ("position_bias", "softcap", "s_aux")
"""Arguments that would change the result and are not followed here: a relative bias, a soft cap, attention sinks."""

_scope: ContextVar[Scope] = ContextVar("scope")


@contextmanager
def attend_within(way: Way, layout: Layout | None, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> Iterator[set[int]]:
    """Within this context, and in this thread, packed attention keeps to the inputs of ``layout``, in this way.

    ``tensors`` has what ``way.arrays`` gives for them, on the device; ``layout`` may be None where the way is graphable. Gives
    the sliding windows that layers ask for, as they do.
    """
    assert layout is not None or way.is_graphable, way.name
    scope = Scope(way, shape, tensors, layout)
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
    """Attention of each input to itself, in the way of ``attend_within``; whatever the way gives for rows of no input.

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
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    return scope.way.attend((query, key, value), scope, Pattern(scale, causal, sliding_window)), None


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


AttentionInterface.register(IMPLEMENTATION, packed_attention)
