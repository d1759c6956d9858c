"""Every way of attention that the device has, against a full mask in float32: formats, head sizes, windows, shared heads.

The only test of this folder that uses the engine's inside: which kernel a model gets cannot be chosen from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu.card import DEVICE, IS_CUDA, on_gpu, only_cuda
from packhorse_worker.engine.attention.packed import attend_within, packed_attention
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.attention.way import Way
from packhorse_worker.engine.attention.ways import ways_for
from packhorse_worker.engine.packing import Layout, Shape, layout_of

pytestmark = on_gpu

TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Of values of about 1."""
LENGTHS = (1, 17, 130, 64, 3, 200)
FILLER = 5
"""Rows behind the last input, not-a-number."""


def ways(dtype: torch.dtype) -> list[Way]:
    """Those that the engine chooses from, and the one for graphs where no kernel works."""
    return [*ways_for(torch.device(DEVICE), dtype), Rectangle()]


def by_mask(tensors: Sequence[torch.Tensor], lengths: Sequence[int], *, causal: bool, window: int | None) -> torch.Tensor:
    """The definition, on the CPU in float32: (rows, heads, size)."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    query, key, value = (each.float().cpu()[0, :, : len(owner)] for each in tensors)
    shared = query.shape[0] // key.shape[0]
    place = torch.arange(len(owner))
    distance = place[:, None] - place
    mask = owner[:, None] == owner
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    scores = query @ key.repeat_interleave(shared, 0).mT * query.shape[2] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(shared, 0)).transpose(0, 1)


def attended(way: Way, tensors: Sequence[torch.Tensor], layout: Layout, *, causal: bool, window: int | None) -> torch.Tensor:
    """By a way, in a shape with room left: (rows of inputs, heads, size) in float32 on the CPU."""
    module: Any = SimpleNamespace(is_causal=causal)
    shape = Shape(tensors[0].shape[2], len(layout.lengths) + 2, 256)
    arrays = {name: torch.from_numpy(each).to(DEVICE) for name, each in way.arrays(layout, shape).items()}
    with torch.inference_mode(), attend_within(way, None if way.is_graphable else layout, shape, arrays):
        found, _ = packed_attention(module, *tensors, None, sliding_window=window)
    return found[0, : layout.tokens].float().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["own heads", "shared heads"])
@pytest.mark.parametrize("window", [None, 6, 64], ids=lambda window: f"window {window}")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_every_way_gives_what_the_mask_says(
    dtype: torch.dtype, size: int, heads: tuple[int, int], window: int | None, *, causal: bool
) -> None:
    if dtype == torch.float16 and not IS_CUDA:
        pytest.skip("float16 needs a GPU")
    layout = layout_of(LENGTHS)
    random = torch.Generator().manual_seed(7)
    rows = layout.tokens + FILLER
    tensors = [torch.randn(rows, count, size, generator=random) for count in (heads[0], heads[1], heads[1])]
    for each in tensors:
        each[layout.tokens :] = torch.nan
    given = [each.to(DEVICE, dtype).transpose(0, 1)[None] for each in tensors]
    wanted = by_mask(given, LENGTHS, causal=causal, window=window)
    for way in ways(dtype):
        try:
            found = attended(way, given, layout, causal=causal, window=window)
        except NotImplementedError:
            assert way.name not in (ways(dtype)[-2].name, Rectangle.name), "the last resort computes everything"
            continue
        assert float((found - wanted).abs().max()) <= TOLERANCES[dtype], way.name


@only_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_card_of_this_age_has_a_kernel_for_many_lengths(dtype: torch.dtype) -> None:
    """A kernel that was left out without anybody noticing: all is right then, and slow."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the kernels need compute capability 8.0")
    found = ways_for(torch.device(DEVICE), dtype)
    assert len(found) > 1, [each.name for each in found]
    assert found[0].is_graphable
