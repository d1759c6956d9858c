"""Attention by one kernel that is told where inputs begin: one launch for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_worker.engine.attention.kernels import Kernel, Reach
from packhorse_worker.engine.attention.way import Pattern, Scope, Tensors, check_fits, repeated
from packhorse_worker.engine.packing import Layout, Shape

_HEAD_STEP = 8
_SHORTEST = 2
"""Told that no input is longer than one token, flash attention takes every row for an input of its own where heads are shared:
rows and slots of no input would be too many or too few."""


class Varlen:
    """See the module. Slots of the shape without an input are inputs of no tokens."""

    is_graphable = True

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.name = kernel.name

    def arrays(self, layout: Layout, shape: Shape) -> dict[str, NDArray[Any]]:
        """See ``Way``. ``attention_offsets``: int32, (batch size + 1,), the place of each input's first token; then its end."""
        check_fits(layout, shape)
        offsets = np.empty(shape.batch_size + 1, dtype=np.int32)
        offsets[: len(layout.offsets)] = layout.offsets
        offsets[len(layout.offsets) :] = layout.tokens
        return {"attention_offsets": offsets}

    def attend(self, tensors: Tensors, scope: Scope, pattern: Pattern) -> torch.Tensor:
        """See ``Way``. Raises NotImplementedError for head sizes, dtypes and windows that the kernel does not take."""
        self._check(tensors, pattern)
        query, key, value = tensors
        if not self._kernel.shares_heads:
            key, value = repeated(key, query.shape[1]), repeated(value, query.shape[1])
        if not self._kernel.takes_scale and (factor := pattern.scale * query.shape[3] ** 0.5) != 1:
            query = query * factor
        rows = (_rows(query), _rows(key), _rows(value))
        longest = max(_SHORTEST, scope.shape.seq_len)
        offsets = scope.tensors["attention_offsets"]
        return self._kernel.call(rows, offsets, longest, _reach(pattern, longest), pattern.scale).unsqueeze(0)

    def _check(self, tensors: Tensors, pattern: Pattern) -> None:
        if pattern.window is not None and not self._kernel.takes_window:
            raise NotImplementedError(f"{self.name} of this version has no sliding window")
        sizes = {each.shape[3] for each in tensors}
        size = max(sizes)
        if len(sizes) > 1 or size % _HEAD_STEP or size > self._kernel.largest_head:
            raise NotImplementedError(
                f"{self.name} takes heads of one size, a multiple of {_HEAD_STEP} up to {self._kernel.largest_head}, "
                f"not {', '.join(str(each) for each in sorted(sizes))}"
            )
        dtypes = {each.dtype for each in tensors}
        if len(dtypes) > 1 or not dtypes <= self._kernel.dtypes:
            raise NotImplementedError(f"{self.name} does not take {', '.join(sorted(str(each) for each in dtypes))}")


def _reach(pattern: Pattern, longest: int) -> Reach:
    """A window of w reaches w - 1 tokens far; one that no input is longer than is none, which is faster."""
    window = pattern.window
    far = -1 if window is None or window >= longest else window - 1
    return far, 0 if pattern.causal else far


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, head size) as (rows, heads, head size). Kernels insist on a head's values lying side by side, and read
    eight of them at once without a look at where they begin: elsewhere than at a multiple of 16 bytes that is the end of the
    CUDA context."""
    rows = tensor.squeeze(0).transpose(0, 1)
    row, head, value = rows.stride()
    is_right = value == 1 and not (row % _HEAD_STEP or head % _HEAD_STEP or rows.storage_offset() % _HEAD_STEP)
    return rows if is_right else rows.clone(memory_format=torch.contiguous_format)
