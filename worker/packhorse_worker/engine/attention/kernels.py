"""Attention kernels for inputs of many lengths, brought under one signature.

All of them are flash attention: they take tensors of shape (rows, heads, head size) and the places where inputs begin, and read
only what lies within an input.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packhorse_worker.engine.attention.way import Tensors

log = logging.getLogger(__name__)

Function = Callable[..., Any]
Reach = tuple[int, int]
"""How many tokens before and behind itself a token sees; -1 for all of them."""

_HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what it takes."""

    name: str
    call: Callable[[Tensors, torch.Tensor, int, Reach, float], torch.Tensor]
    """Of query, key and value, the offsets (int32, one more than inputs), the longest input's tokens at most, how far a token
    sees, and the scale; gives (rows, heads, head size)."""
    takes_window: bool
    takes_scale: bool
    """Without it, ``call`` scales by 1 over the root of the head size, whatever it is told."""
    shares_heads: bool
    """Whether there may be fewer heads of keys and values than of queries."""
    dtypes: frozenset[torch.dtype] = _HALF
    largest_head: int = 256


def installed_kernels() -> Iterator[Sequence[Kernel]]:
    """Kernels of this installation, best first; of each the ways to call it, in the order in which to try them.

    torch's own comes first: it is built for this very torch, and told not to split an input's keys it gives an input the same
    numbers whatever lies beside it.
    """
    if (function := _imported("torch.nn.attention.varlen", "varlen_attn")) is not None:
        yield torch_kernels(function)
    if (function := _imported("flash_attn", "flash_attn_varlen_func")) is not None:
        yield [flash_attn_kernel(function)]


def torch_kernels(function: Function) -> list[Kernel]:
    """``varlen_attn`` of torch 2.10 (``is_causal``; neither window nor scale), 2.11 (``window_size`` and ``scale``) or later
    (also ``enable_gqa`` and ``num_splits``).

    First with every argument that its signature has, then without those that some of its backends refuse.
    https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
    """
    names = set(inspect.signature(function).parameters)
    refused = [name for name in ("num_splits", "enable_gqa") if name in names]
    return [
        _torch_kernel(function, names.difference(without))
        for count in range(len(refused) + 1)
        for without in itertools.combinations(refused, count)
    ]


def _torch_kernel(function: Function, taken: set[str]) -> Kernel:
    """``taken``: the names of the arguments that it is called with."""
    fixed: dict[str, Any] = {"num_splits": 1} if "num_splits" in taken else {}

    def call(tensors: Tensors, offsets: torch.Tensor, longest: int, reach: Reach, scale: float) -> torch.Tensor:
        options = dict(fixed)
        if "window_size" in taken:
            options["window_size"] = reach
        else:
            options["is_causal"] = reach[1] == 0
        if "scale" in taken:
            options["scale"] = scale
        if "enable_gqa" in taken and tensors[0].shape[1] != tensors[1].shape[1]:
            options["enable_gqa"] = True
        output: torch.Tensor = function(*tensors, offsets, offsets, longest, longest, **options)
        return output

    return Kernel("torch's varlen attention", call, "window_size" in taken, "scale" in taken, "enable_gqa" in taken)


def flash_attn_kernel(function: Function) -> Kernel:
    """``flash_attn_varlen_func`` of the package flash-attn 2; before 2.3 it has no window.

    https://github.com/Dao-AILab/flash-attention
    """
    takes_window = "window_size" in inspect.signature(function).parameters

    def call(tensors: Tensors, offsets: torch.Tensor, longest: int, reach: Reach, scale: float) -> torch.Tensor:
        options: dict[str, Any] = {"window_size": reach} if takes_window else {}
        output: torch.Tensor = function(
            *tensors, offsets, offsets, longest, longest, softmax_scale=scale, causal=reach[1] == 0, **options
        )
        return output

    return Kernel("flash-attn", call, takes_window, takes_scale=True, shares_heads=True)


def _imported(module: str, name: str) -> Function | None:
    """A function of a package; None where there is none, or where it does not fit this torch."""
    try:
        function: Function = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return None
    except Exception as problem:
        log.info("an attention kernel cannot be imported", extra={"module": module, "reason": f"{problem}"})
        return None
    return function
