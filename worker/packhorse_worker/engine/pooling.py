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

FIRSTS, LASTS, BAGS, COUNTS, WEIGHTS, WEIGHT_SUMS = (
    f"pool_{name}" for name in ("firsts", "lasts", "bags", "counts", "weights", "weight_sums")
)
"""Names of the arrays: the first and last pooled row of each input; where the bags of rows begin that are summed (two for each
input, the tokens left out and the pooled ones, and one of filler behind all tokens); how many are pooled; what each row weighs,
and what the pooled ones of an input weigh together."""

_READ: Mapping[PoolingMode, tuple[str, ...]] = {
    "cls": (FIRSTS,),
    "lasttoken": (LASTS,),
    "max": (BAGS,),
    "mean": (BAGS, COUNTS),
    "mean_sqrt_len_tokens": (BAGS, COUNTS),
    "weightedmean": (BAGS, WEIGHTS, WEIGHT_SUMS),
}


def pool_arrays(inputs: Sequence[Input], layout: Layout, shape: Shape, pooling: Pooling) -> dict[str, NDArray[Any]]:
    """What ``pool`` reads. ``layout`` may have dummies behind the ``inputs``.

    A model with ``include_prompt`` false leaves out the leading tokens that are its prompt's; the last token always stays, so
    that an input which is all prompt still has a vector.
    """
    lengths = np.array(layout.lengths)
    starts = np.array(layout.starts())
    skipped = np.zeros(len(lengths), dtype=np.int64)
    if not pooling.include_prompt:
        skipped[: len(inputs)] = [each.prompt_tokens for each in inputs]
        skipped = np.minimum(skipped, lengths - 1)
    names = {name for mode in pooling.modes for name in _READ[mode]}
    arrays: dict[str, NDArray[Any]] = {}
    if FIRSTS in names:
        arrays[FIRSTS] = starts + skipped
    if LASTS in names:
        arrays[LASTS] = np.array(layout.lasts())
    if BAGS in names:
        arrays[BAGS] = bags(layout, skipped)
    if COUNTS in names:
        arrays[COUNTS] = (lengths - skipped).astype(np.float32)[:, None]
    if WEIGHTS in names:
        # A token weighs its position in the input, counted from 1; those behind a prompt keep theirs.
        arrays[WEIGHTS] = np.zeros(shape.num_tokens, dtype=np.float32)
        arrays[WEIGHTS][: layout.tokens] = np.arange(1, layout.tokens + 1) - np.repeat(starts, lengths)
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


def bags(layout: Layout, skipped: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the bags begin that ``sums_of`` sums, shape (2 x inputs + 1,)."""
    starts = np.array(layout.starts())
    found = np.empty(2 * len(starts) + 1, dtype=np.int64)
    found[:-1:2] = starts
    found[1::2] = starts + skipped
    found[-1] = layout.tokens
    return found


def sums_of(
    hidden: torch.Tensor, offsets: torch.Tensor, mode: str = "sum", weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum (or maximum) of the pooled rows of each input. ``offsets``: those of ``bags``."""
    rows = torch.arange(len(hidden), device=hidden.device)
    return functional.embedding_bag(rows, hidden, offsets, mode=mode, per_sample_weights=weights)[1::2]


def _pool_one(mode: PoolingMode, hidden: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    match mode:
        case "cls":
            return hidden[tensors[FIRSTS]]
        case "lasttoken":
            return hidden[tensors[LASTS]]
        case "max":
            # On a GPU the largest of some values may pass over a NaN; a sum does not.
            return sums_of(hidden, tensors[BAGS], "max") + 0 * sums_of(hidden, tensors[BAGS])
        case "weightedmean":
            return sums_of(hidden, tensors[BAGS], weights=tensors[WEIGHTS]) / tensors[WEIGHT_SUMS]
        case "mean" | "mean_sqrt_len_tokens":
            count = tensors[COUNTS]
            return sums_of(hidden, tensors[BAGS]) / (count if mode == "mean" else count.sqrt())
