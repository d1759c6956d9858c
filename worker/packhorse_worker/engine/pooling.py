"""Token vectors to one vector per input, as sentence-transformers' ``Pooling`` defines it, in float32.

Rows are taken by index and by mask, never multiplied by it: whatever stands in pad rows, NaN included, has no part in a result.
"""

from __future__ import annotations

import torch

from packhorse_worker.engine.modules import Pooling, PoolingMode


def pool(hidden: torch.Tensor, lengths: torch.Tensor, prompt_tokens: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pooled vectors, float32, shape (inputs, modes x hidden size).

    ``hidden``: (inputs, longest, hidden size), right-padded. ``lengths``: tokens of each input, at least 1.
    ``prompt_tokens``: leading tokens that are left out where the model has ``include_prompt`` false; the last token always
    stays, so that an input which is all prompt still has a vector.
    """
    hidden = hidden.float()
    starts = torch.zeros_like(lengths) if pooling.include_prompt else torch.minimum(prompt_tokens, lengths - 1)
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    mask = (positions >= starts[:, None]) & (positions < lengths[:, None])
    return torch.cat([_pool_one(mode, hidden, mask, starts, lengths) for mode in pooling.modes], dim=-1)


def _pool_one(
    mode: PoolingMode, hidden: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    rows = torch.arange(hidden.shape[0], device=hidden.device)
    match mode:
        case "cls":
            return hidden[rows, starts]
        case "lasttoken":
            return hidden[rows, lengths - 1]
        case "max":
            return hidden.masked_fill(~mask[:, :, None], float("-inf")).amax(dim=1)
        case "weightedmean":
            # A token weighs its position in the input, counted from 1; those behind a prompt keep theirs.
            weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=torch.float32) * mask
            weighted = hidden.masked_fill(~mask[:, :, None], 0.0) * weights[:, :, None]
            return weighted.sum(dim=1) / weights.sum(dim=1, keepdim=True)
        case "mean" | "mean_sqrt_len_tokens":
            count = (lengths - starts)[:, None].float()
            total = hidden.masked_fill(~mask[:, :, None], 0.0).sum(dim=1)
            return total / (count if mode == "mean" else count.sqrt())
