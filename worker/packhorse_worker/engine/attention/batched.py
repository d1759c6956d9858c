"""Attention on a CPU as batched matrix products: several inputs of nearly equal length at once, scores and all.

torch's flash kernel takes one length at a time, and its softmax is slow in bfloat16 and at widths that are no multiple of 16.
Up to a few hundred tokens the scores of some inputs fit into the cache, and two matrix products with a softmax between them
are faster: 1.2 to 2.9 times in bfloat16, 1.0 to 2.8 times in float32 (medians of 9 alternating runs, 12 heads of 32 and 64,
2 threads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from packhorse_worker.engine.attention.way import Tensors
from packhorse_worker.engine.packing import Layout, Run

_WIDTH_STEP = 16
_WIDEST = {torch.float32: 128, torch.bfloat16: 512}
"""Beyond, the flash kernel is faster."""
_MOST_SCORES = {torch.float32: 1 << 18, torch.bfloat16: 1 << 20}
"""Scores of one product: more fall out of the cache."""
NARROWEST_ALONE = 32
"""Up to here one input by itself is better off with a single call."""


@dataclass(frozen=True)
class Chunk:
    """Neighbours whose lengths are equal when rounded up to a multiple of 16: one pair of matrix products."""

    start: int
    """Place of its first token."""
    end: int
    inputs: int
    width: int
    """The rounded length."""
    filled: _Filled | None
    """None where every input has just this length."""


@dataclass(frozen=True)
class _Filled:
    """How shorter inputs are brought to the chunk's width: their last token stands in for what is missing, and is masked."""

    rows: torch.Tensor
    """Rows of (head size,) in the order (inputs, heads, width), counted from the chunk's first one in memory."""
    mask: torch.Tensor
    """What is added to the scores, float32, (inputs, 1, 1, width)."""
    back: torch.Tensor
    """Of (inputs x heads x width) in the order (tokens, heads): the way back."""


@dataclass(frozen=True)
class Heads:
    """What the layers of a forward have in common: their tensors are of shape (rows, heads, head size)."""

    count: int
    step: int
    """Heads from one row to the next in memory: more than ``count`` where query, key and value lie side by side."""
    dtype: torch.dtype


def step_of(tensors: Tensors) -> int | None:
    """``Heads.step`` of query, key and value; None where they lie otherwise, and would have to be copied."""
    size = tensors[0].shape[2]
    strides = {each.stride() for each in tensors}
    row, head, value = next(iter(strides))
    return row // size if len(strides) == 1 and (head, value) == (size, 1) and row % size == 0 else None


def plan(layout: Layout, heads: Heads) -> list[Chunk | Run]:
    """What to do with each part of a layout, in order: a ``Chunk`` for ``attend``, a ``Run`` for a flash kernel."""
    dtype = heads.dtype
    widest = _WIDEST.get(dtype, 0)
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        widest = 0
    parts: list[Chunk | Run] = []
    waiting: list[Run] = []
    for run in layout.runs:
        if waiting and _width(waiting[0]) != _width(run):
            parts += _chunks(waiting, heads)
            waiting = []
        if run.length > widest:
            parts.append(run)
        else:
            waiting.append(run)
    if waiting:
        parts += _chunks(waiting, heads)
    return parts


def attend(chunk: Chunk, tensors: Tensors, into: torch.Tensor, scale: float) -> None:
    """Attention of a chunk's inputs, each to all of itself. ``tensors``: query, key and value, as ``into`` of shape (rows,
    heads, head size), and lying in memory as the plan's ``Heads`` says."""
    q, k, v = (_inputs_of(each, chunk) for each in tensors)
    scores = torch.baddbmm(q.new_empty(1, 1, 1).expand(len(q), chunk.width, chunk.width), q, k.mT, beta=0, alpha=scale)
    if chunk.filled is not None or chunk.width % 32:
        scores = scores.float()  # torch's softmax computes in float32 anyway, and much faster so at odd widths
    if chunk.filled is not None:
        scores.view(chunk.inputs, -1, chunk.width, chunk.width).add_(chunk.filled.mask)
    outputs = torch.bmm(torch.softmax(scores, dim=-1).to(v.dtype), v)
    _, heads, size = into.shape
    into = into[chunk.start : chunk.end]
    if chunk.filled is None:
        back = outputs.view(chunk.inputs, heads, chunk.width, size).transpose(1, 2)
        into.view(chunk.inputs, chunk.width, heads, size).copy_(back)
    else:
        torch.index_select(outputs.view(-1, size), 0, chunk.filled.back, out=into.view(-1, size))


def _width(run: Run) -> int:
    return -(-run.length // _WIDTH_STEP) * _WIDTH_STEP


def _chunks(runs: list[Run], heads: Heads) -> list[Chunk]:
    """Chunks of neighbours of one width, powers of two in number: oneDNN prepares its kernels anew for every other one."""
    width = _width(runs[0])
    lengths = np.repeat([run.length for run in runs], [run.inputs for run in runs])
    most = max(1, _MOST_SCORES[heads.dtype] // (heads.count * width * width))
    chunks, done, start = [], 0, runs[0].start
    while done < len(lengths):
        inputs = min(len(lengths) - done, most)
        inputs = 1 << (inputs.bit_length() - 1)
        some = lengths[done : done + inputs]
        filled = None if (some == width).all() else _fill(some, width, heads)
        chunks.append(Chunk(start, start + int(some.sum()), inputs, width, filled))
        start, done = chunks[-1].end, done + inputs
    return chunks


def _fill(lengths: NDArray[np.int64], width: int, heads: Heads) -> _Filled:
    starts = lengths.cumsum() - lengths
    column, head = np.arange(width), np.arange(heads.count)
    tokens = starts[:, None] + np.minimum(column, lengths[:, None] - 1)
    is_real = column < lengths[:, None]
    number, place = np.nonzero(is_real)
    mask = np.where(is_real, 0.0, -np.inf).astype(np.float32)
    return _Filled(
        rows=torch.from_numpy((tokens[:, None, :] * heads.step + head[:, None]).ravel()),
        mask=torch.from_numpy(mask)[:, None, None],
        back=torch.from_numpy(((number[:, None] * heads.count + head) * width + place[:, None]).ravel()),
    )


def _inputs_of(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """(inputs x heads, width, head size) of a chunk, contiguous."""
    _, heads, size = tensor.shape
    tensor = tensor[chunk.start : chunk.end]
    if chunk.filled is None:
        inputs = tensor.view(chunk.inputs, chunk.width, heads, size).transpose(1, 2)
        return inputs.reshape(chunk.inputs * heads, chunk.width, size)
    step = tensor.stride(0) // size
    rows = tensor.as_strided(((len(tensor) - 1) * step + heads, size), (size, 1))
    return rows.index_select(0, chunk.filled.rows).view(-1, chunk.width, size)
