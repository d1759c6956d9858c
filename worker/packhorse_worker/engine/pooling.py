"""Token vectors to one vector per input, as sentence-transformers' ``Pooling`` defines it, in float32.

Rows are taken by index, never multiplied by a mask: what stands in a neighbour's rows or behind the last token, NaN included,
has no part in a result. Everything that depends on the inputs comes as arrays whose sizes follow from the shape of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.modules import Pooling, PoolingMode
from packhorse_worker.engine.packing import Layout, Shape

FIRSTS, LASTS, BAGS, PARTS, COUNTS, WEIGHTS, WEIGHT_SUMS = (
    f"pool_{name}" for name in ("firsts", "lasts", "bags", "parts", "counts", "weights", "weight_sums")
)
"""Names of the arrays: the first and last pooled row of each input; where the bags of rows begin that are summed (two for each
input, the tokens left out and the pooled ones, and one of filler behind all tokens), or with parts where those begin, and the
first part of each bag; how many are pooled; what each row weighs, and what the pooled ones of an input weigh together."""

_PART_ROWS = 32

_READ: Mapping[PoolingMode, tuple[str, ...]] = {
    "cls": (FIRSTS,),
    "lasttoken": (LASTS,),
    "max": (BAGS,),
    "mean": (BAGS, COUNTS),
    "mean_sqrt_len_tokens": (BAGS, COUNTS),
    "weightedmean": (BAGS, WEIGHTS, WEIGHT_SUMS),
}


def pool_arrays(
    inputs: Sequence[Input], layout: Layout, shape: Shape, pooling: Pooling, *, in_parts: bool
) -> dict[str, NDArray[Any]]:
    """What ``pool`` reads. ``layout`` may have dummies behind the ``inputs``.

    ``in_parts``: bags are summed in two steps. A GPU adds up the rows of a bag one after the other, so that a long input, or
    much filler, would take longer than the layers of a small model.

    A model with ``include_prompt`` false leaves out the leading tokens that are its prompt's; the last token always stays, so
    that an input which is all prompt still has a vector.
    """
    lengths = layout.sizes
    skipped: NDArray[np.int64] | int = 0
    if not pooling.include_prompt:
        skipped = np.zeros_like(lengths)
        skipped[: len(inputs)] = [each.prompt_tokens for each in inputs]
        skipped = np.minimum(skipped, lengths - 1)
    names = {name for mode in pooling.modes for name in _READ[mode]}
    arrays: dict[str, NDArray[Any]] = {}
    if FIRSTS in names:
        arrays[FIRSTS] = layout.starts + skipped
    if LASTS in names:
        arrays[LASTS] = layout.lasts
    if BAGS in names:
        arrays[BAGS] = bags(layout, skipped)
        if in_parts:
            arrays[PARTS], arrays[BAGS] = _in_parts(arrays[BAGS], shape.num_tokens)
    if COUNTS in names:
        arrays[COUNTS] = (lengths - skipped).astype(np.float32)[:, None]
    if WEIGHTS in names:
        # A token weighs its position in the input, counted from 1; those behind a prompt keep theirs.
        arrays[WEIGHTS] = np.zeros(shape.num_tokens, dtype=np.float32)
        arrays[WEIGHTS][: layout.tokens] = layout.within + 1
        # Those of an input are skipped + 1 to its length: their sum is known.
        arrays[WEIGHT_SUMS] = ((lengths * (lengths + 1) - skipped * (skipped + 1)) / 2).astype(np.float32)[:, None]
    return arrays


def pool(hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor], pooling: Pooling) -> torch.Tensor:
    """Pooled vectors, float32, shape (inputs, modes x hidden size).

    ``hidden``: (rows, hidden size), the inputs one behind the other, perhaps with filler behind them. ``tensors``: those of
    ``pool_arrays``.
    """
    hidden = hidden.float()
    return torch.cat([_pool_one(mode, hidden, tensors) for mode in pooling.modes], dim=-1)


def bags(layout: Layout, skipped: NDArray[np.int64] | int = 0) -> NDArray[np.int64]:
    """Where the bags begin that ``sums_of`` sums, shape (2 x inputs + 1,)."""
    found = np.empty(2 * len(layout.lengths) + 1, dtype=np.int64)
    found[::2] = layout.offsets
    found[1::2] = layout.starts + skipped
    return found


def sums_of(
    hidden: torch.Tensor, offsets: torch.Tensor, mode: str = "sum", weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum (or maximum) of the pooled rows of each input. ``offsets``: those of ``bags``."""
    return _sums(hidden, offsets, mode, weights)[1::2]


def _in_parts(offsets: NDArray[np.int64], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bags of so many rows in all cut into parts of some rows: where the parts begin, shape (rows // 32 + bags,), those that
    are not needed empty at the end; and which part each bag begins with, shape (bags,)."""
    counts = -(-np.diff(offsets, append=rows) // _PART_ROWS)
    firsts = counts.cumsum() - counts
    needed = int(counts.sum())
    parts = np.full(rows // _PART_ROWS + len(offsets), rows, dtype=np.int64)
    parts[:needed] = np.repeat(offsets, counts) + _PART_ROWS * (np.arange(needed) - np.repeat(firsts, counts))
    return parts, firsts


def _sums(hidden: torch.Tensor, offsets: torch.Tensor, mode: str, weights: torch.Tensor | None = None) -> torch.Tensor:
    rows = torch.arange(len(hidden), device=hidden.device)
    return functional.embedding_bag(rows, hidden, offsets, mode=mode, per_sample_weights=weights)


def _pooled(
    hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor], mode: str = "sum", weights: torch.Tensor | None = None
) -> torch.Tensor:
    if PARTS not in tensors:
        return sums_of(hidden, tensors[BAGS], mode, weights)
    return sums_of(_sums(hidden, tensors[PARTS], mode, weights), tensors[BAGS], mode)


def _pool_one(mode: PoolingMode, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    match mode:
        case "cls":
            return hidden[tensors[FIRSTS]]
        case "lasttoken":
            return hidden[tensors[LASTS]]
        case "max":
            # On a GPU the largest of some values may pass over a NaN; a sum does not.
            return _pooled(hidden, tensors, "max") + 0 * _pooled(hidden, tensors)
        case "weightedmean":
            return _pooled(hidden, tensors, weights=tensors[WEIGHTS]) / tensors[WEIGHT_SUMS]
        case "mean" | "mean_sqrt_len_tokens":
            count = tensors[COUNTS]
            return _pooled(hidden, tensors) / (count if mode == "mean" else count.sqrt())
