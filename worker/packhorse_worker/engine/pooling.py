"""Token vectors to one vector per input, as sentence-transformers' ``Pooling`` defines it, in float32.

Rows are taken by index, never multiplied by a mask: what stands in a neighbour's rows, NaN included, has no part in a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from packhorse_worker.engine.files.modules import Pooling, PoolingMode
from packhorse_worker.engine.packing import Layout


@dataclass(frozen=True)
class _Kept:
    """The tokens of each input that are pooled, as rows of the hidden state."""

    rows: torch.Tensor
    """Shape (kept tokens,)."""
    offsets: torch.Tensor
    """Where each input begins among ``rows``, shape (inputs,)."""
    counts: torch.Tensor
    """Kept tokens of each input, at least 1, shape (inputs,)."""
    skipped: torch.Tensor
    """Leading tokens of each input that are left out, shape (inputs,)."""


def pool(hidden: torch.Tensor, layout: Layout, prompt_tokens: Sequence[int], pooling: Pooling) -> torch.Tensor:
    """Pooled vectors, float32, shape (inputs, modes x hidden size).

    ``hidden``: (rows, hidden size), the inputs of ``layout`` one behind the other, perhaps with filler behind them.
    ``prompt_tokens``: leading tokens that are left out where the model has ``include_prompt`` false; the last token always
    stays, so that an input which is all prompt still has a vector.
    """
    hidden = hidden.float()
    kept = _keep(layout, [0] * len(layout.lengths) if pooling.include_prompt else prompt_tokens, hidden.device)
    return torch.cat([_pool_one(mode, hidden, kept) for mode in pooling.modes], dim=-1)


def _keep(layout: Layout, prompt_tokens: Sequence[int], device: torch.device) -> _Kept:
    lengths = torch.tensor(layout.lengths)
    skipped = torch.minimum(torch.tensor(list(prompt_tokens)), lengths - 1)
    counts = lengths - skipped
    offsets = counts.cumsum(0) - counts
    if int(skipped.max()) == 0:
        rows = torch.arange(layout.tokens)
    else:
        starts = torch.tensor(layout.starts()) + skipped
        rows = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - offsets, counts)
    return _Kept(rows.to(device), offsets.to(device), counts.to(device), skipped.to(device))


def _pool_one(mode: PoolingMode, hidden: torch.Tensor, kept: _Kept) -> torch.Tensor:
    match mode:
        case "cls":
            return hidden[kept.rows[kept.offsets]]
        case "lasttoken":
            return hidden[kept.rows[kept.offsets + kept.counts - 1]]
        case "max":
            return functional.embedding_bag(kept.rows, hidden, kept.offsets, mode="max")
        case "weightedmean":
            # A token weighs its position in the input, counted from 1; those behind a prompt keep theirs.
            place = torch.arange(len(kept.rows), device=hidden.device)
            weights = (place + 1 + torch.repeat_interleave(kept.skipped - kept.offsets, kept.counts)).float()
            total = functional.embedding_bag(kept.rows, hidden, kept.offsets, mode="sum", per_sample_weights=weights)
            # The weights of an input are skipped + 1 to skipped + count: their sum is known.
            return total / (kept.counts * (2 * kept.skipped + kept.counts + 1) / 2)[:, None]
        case "mean" | "mean_sqrt_len_tokens":
            total = functional.embedding_bag(kept.rows, hidden, kept.offsets, mode="sum")
            count = kept.counts[:, None].float()
            return total / (count if mode == "mean" else count.sqrt())
