"""Packed attention in every way against attention with a full mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from kernels import WAYS, WITHOUT_WINDOW
from packhorse_worker.engine.attention.batched import Heads, plan
from packhorse_worker.engine.attention.packed import attend_within, packed_attention
from packhorse_worker.engine.attention.runs import ByRuns
from packhorse_worker.engine.attention.way import Way
from packhorse_worker.engine.packing import Layout, Run, Shape, layout_of

any_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def side_by_side(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As one projection makes them: columns of one buffer."""
    torch.manual_seed(7)
    q, k, v = (part.view(1, tokens, 4, 8).transpose(1, 2) for part in torch.randn(1, tokens, 96).split(32, dim=-1))
    return q, k, v


def rotated(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As rotary models make them: query and key by heads, the value by tokens."""
    q, k, v = tensors(tokens)
    return q.contiguous(), k.contiguous(), v


def head_by_head(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With the values of a head apart in memory, which kernels refuse."""
    q, k, v = (each.mT.contiguous().mT for each in tensors(tokens))
    assert q.stride(3) > 1
    return q, k, v


def tensors(tokens: int, heads: int = 4, key_heads: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as most models make them: views of (tokens, heads x size) buffers."""
    torch.manual_seed(7)
    shapes = (heads, key_heads or heads, key_heads or heads)
    q, k, v = (torch.randn(1, tokens, count * 8).view(1, tokens, count, 8).transpose(1, 2) for count in shapes)
    return q, k, v


def by_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], *, causal: bool, window: int | None
) -> torch.Tensor:
    """The definition: one softmax over all tokens, with everything masked that an input must not see."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(owner))
    mask = owner[:, None] == owner
    distance = place[:, None] - place
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, way: Way = WAYS["by runs"], **options: Any
) -> torch.Tensor:
    module: Any = SimpleNamespace(is_causal=False)
    shape = Shape(layout.tokens, len(layout.lengths), layout.longest)
    arrays = {name: torch.from_numpy(each) for name, each in way.arrays(layout, shape).items()}
    with attend_within(way, None if way.is_graphable else layout, shape, arrays):
        return packed_attention(module, q, k, v, None, **options)[0]


@any_way
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 150, 1000])
@pytest.mark.parametrize("lengths", [[1], [300], [300, 20, 20, 20, 7, 1, 1], [7, 300, 7]])
def test_every_input_sees_itself_only(way: Way, lengths: list[int], window: int | None, *, causal: bool) -> None:
    q, k, v = tensors(sum(lengths))
    if window is not None and way is WAYS[WITHOUT_WINDOW]:
        with pytest.raises(NotImplementedError, match="no sliding window"):
            packed(q, k, v, layout_of(lengths), way, is_causal=causal, sliding_window=window)
        return
    expected = by_mask(q, k, v, lengths, causal=causal, window=window)
    result = packed(q, k, v, layout_of(lengths), way, is_causal=causal, sliding_window=window)
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "lengths",
    [[16] * 3, [32, 32, 31, 20, 17, 16], [600, 513, 512, 500, 129, 128, 128, 127, 5], [5, 40, 5, 600, 40], [130] * 40],
)
def test_chunks_of_like_lengths_give_the_same(lengths: list[int], dtype: torch.dtype) -> None:
    """With filled and with exact widths, beyond the widest, and of more inputs than one product takes."""
    q, k, v = (each.to(dtype) for each in tensors(sum(lengths)))
    expected = by_mask(q.float(), k.float(), v.float(), lengths, causal=False, window=None)
    result = packed(q, k, v, layout_of(lengths))
    assert result.dtype == dtype
    assert float((result.float() - expected).abs().max()) <= (1e-5 if dtype == torch.float32 else 0.03)


@any_way
@pytest.mark.parametrize("make", [tensors, side_by_side, rotated, head_by_head])
@pytest.mark.parametrize("lengths", [[20], [33, 32, 31, 20, 20, 17, 1], [64, 64, 33, 33, 33]])
def test_however_query_key_and_value_lie_in_memory(way: Way, lengths: list[int], make: Callable[[int], Any]) -> None:
    q, k, v = make(sum(lengths))
    expected = by_mask(q, k, v, lengths, causal=False, window=None)
    assert float((packed(q, k, v, layout_of(lengths), way) - expected).abs().max()) <= 1e-5


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.booleans())
def test_a_plan_covers_every_token_once(lengths: list[int], in_order: bool) -> None:
    layout = layout_of(sorted(lengths) if in_order else lengths)
    place = 0
    for part in plan(layout, Heads(4, 4, torch.float32)):
        assert part.start == place
        place = part.end
    assert place == layout.tokens


@any_way
def test_query_heads_share_key_heads(way: Way) -> None:
    q, k, v = tensors(30, heads=6, key_heads=2)
    expected = by_mask(q, k, v, [20, 10], causal=True, window=None)
    assert float((packed(q, k, v, layout_of([20, 10]), way, is_causal=True) - expected).abs().max()) <= 1e-5


@any_way
def test_scaling_is_honoured(way: Way) -> None:
    q, k, v = tensors(10)
    expected = by_mask(q * 3, k, v, [10], causal=False, window=None)
    assert float((packed(q, k, v, layout_of([10]), way, scaling=3 / 8**0.5) - expected).abs().max()) <= 1e-5


def test_the_argument_comes_before_the_module() -> None:
    q, k, v = tensors(10)
    expected = by_mask(q, k, v, [10], causal=False, window=None)
    module: Any = SimpleNamespace(is_causal=True)
    with attend_within(ByRuns(), layout_of([10]), Shape(10, 1, 10), {}):
        result, _ = packed_attention(module, q, k, v, None, is_causal=False)
        causal, _ = packed_attention(module, q, k, v, None)
    assert float((result - expected).abs().max()) <= 1e-5
    assert float((causal - expected).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["position_bias", "softcap", "s_aux"])
def test_what_is_not_honoured_is_refused(name: str) -> None:
    q, k, v = tensors(4)
    with pytest.raises(NotImplementedError, match=name):
        packed(q, k, v, layout_of([4]), **{name: torch.ones(1)})


def test_a_mask_is_refused() -> None:
    q, k, v = tensors(4)
    module: Any = SimpleNamespace(is_causal=False)
    with attend_within(ByRuns(), layout_of([4]), Shape(4, 1, 4), {}), pytest.raises(NotImplementedError, match="mask"):
        packed_attention(module, q, k, v, torch.ones(1, 1, 4, 4))


@any_way
@pytest.mark.parametrize(("first", "last"), [(0, 5), (5, 10), (10, 14)])
def test_a_neighbour_full_of_nan_changes_nothing(way: Way, first: int, last: int) -> None:
    q, k, v = tensors(14)
    expected = packed(q, k, v, layout_of([5, 5, 4]), way)
    for each in (q, k, v):
        each[:, :, first:last] = float("nan")
    result = packed(q, k, v, layout_of([5, 5, 4]), way)
    kept = [*range(first), *range(last, 14)]
    assert torch.equal(result[:, kept], expected[:, kept])


def test_a_layout_has_one_run_for_neighbours_of_equal_length() -> None:
    layout = layout_of([5, 5, 3, 5])
    assert layout.runs == (Run(0, 2, 5), Run(10, 1, 3), Run(13, 1, 5))
    assert (layout.tokens, layout.longest, layout.starts.tolist()) == (18, 5, [0, 5, 10, 13])
