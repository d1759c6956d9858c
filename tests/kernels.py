"""Attention kernels for inputs of many lengths as torch and flash-attn have them, computed plainly: they stand in for CUDA's.

Signatures and meaning are the documented ones; what the real ones insist on is insisted on. As theirs, the output's rows behind
the last input are never written.
"""

# ruff: noqa: PLR0917 - signatures are as they are elsewhere

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from packhorse_worker.engine.attention.kernels import Kernel, flash_attn_kernel, torch_kernels
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.attention.runs import ByRuns
from packhorse_worker.engine.attention.varlen import Varlen
from packhorse_worker.engine.attention.way import Way


def torch_2_10(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> torch.Tensor:
    assert return_aux is None
    assert query.shape[1] == key.shape[1], "this one knows nothing of shared heads"
    window = (-1, 0) if is_causal else (-1, -1)
    return attention((query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k), window, None)


def torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    assert return_aux is None
    assert query.shape[1] == key.shape[1], "this one knows nothing of shared heads"
    assert isinstance(window_size, tuple), "(-1, 0) is compared with a tuple, and means causal"
    return attention((query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k), window_size, scale)


def torch_2_13(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    assert (return_aux, seqused_k, block_table, num_splits) == (None, None, None, 1)
    assert cu_seq_k is not None
    assert isinstance(window_size, tuple)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return attention((query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k), window_size, scale)


def flash_attn_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert (dropout_p, softcap, alibi_slopes, return_attn_probs, block_table) == (0.0, 0.0, None, False, None)
    reach = (window_size[0], 0) if causal else window_size
    return attention((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), reach, softmax_scale)


def attention(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets: tuple[torch.Tensor, torch.Tensor],
    most: tuple[int, int],
    reach: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    """Each input's softmax over the keys within reach, in float32."""
    query, key, _ = tensors
    for each in tensors:
        assert each.dim() == 3
        assert each.stride(2) == 1, "a head's values lie side by side"
        begins = (*each.stride()[:2], each.storage_offset())
        assert not any(each % 8 for each in begins), "eight values of 16 bits are read at once"
        assert (each.shape[0], each.shape[2], each.dtype) == (query.shape[0], query.shape[2], query.dtype)
    assert query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    for each in offsets:
        assert each.dtype == torch.int32
        assert each.is_contiguous()
    assert torch.equal(*offsets)
    places = offsets[0].tolist()
    assert places[0] == 0
    assert max(end - start for start, end in itertools.pairwise(places)) <= min(most)
    shared = query.shape[1] // key.shape[1]
    if most[0] == 1 and shared > 1:
        assert len(query) == len(places) - 1, "as if every row were an input"
    output = torch.full_like(query, float("nan"))
    for start, end in itertools.pairwise(places):
        assert 0 <= start <= end <= len(query)
        q, k, v = (each[start:end].transpose(0, 1).float() for each in tensors)
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        scores = q @ k.mT * (query.shape[2] ** -0.5 if scale is None else scale)
        place = torch.arange(end - start)
        distance = place - place[:, None]
        for far, beyond in ((reach[0], -distance), (reach[1], distance)):
            if far >= 0:
                scores = scores.masked_fill(beyond > far, float("-inf"))
        output[start:end] = (torch.softmax(scores, -1) @ v).transpose(0, 1).to(query.dtype)
    return output


def in_float32(kernel: Kernel) -> Kernel:
    """The same kernel, taking float32 too: so that differences are not rounding."""
    return replace(kernel, dtypes=kernel.dtypes | {torch.float32})


WAYS: dict[str, Way] = {
    "by runs": ByRuns(),
    "rectangle": Rectangle(),
    **{each.__name__: Varlen(in_float32(torch_kernels(each)[0])) for each in (torch_2_10, torch_2_11, torch_2_13)},
    "flash_attn_2": Varlen(in_float32(flash_attn_kernel(flash_attn_2))),
}
"""Every way, the kernels as different versions have them."""

WITHOUT_WINDOW = "torch_2_10"
"""The one of ``WAYS`` that refuses sliding windows."""
