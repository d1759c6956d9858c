"""Pooling over rows by index, at once and in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.files.modules import Pooling
from packhorse_worker.engine.packing import Shape, layout_of
from packhorse_worker.engine.pooling import pool, pool_arrays

WIDTH = 4
MODES = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(
    hidden: torch.Tensor, prompts: list[int], lengths: list[int], *, include_prompt: bool, in_parts: bool
) -> torch.Tensor:
    modes: Any = MODES
    pooling = Pooling(modes=modes, include_prompt=include_prompt)
    layout = layout_of(lengths)
    inputs = [
        Input(np.zeros(length, dtype=np.int32), prompt_tokens=prompt) for length, prompt in zip(lengths, prompts, strict=False)
    ]
    arrays = pool_arrays(inputs, layout, Shape(len(hidden), len(lengths), layout.longest), pooling, in_parts=in_parts)
    return pool(hidden, {name: torch.from_numpy(array) for name, array in arrays.items()}, pooling)


def by_definition(hidden: torch.Tensor, prompts: list[int], lengths: list[int], *, include_prompt: bool) -> torch.Tensor:
    vectors = []
    start = 0
    for number, length in enumerate(lengths):
        prompt = prompts[number] if number < len(prompts) and not include_prompt else 0
        skipped = min(prompt, length - 1)
        kept = hidden[start + skipped : start + length].double()
        weights = torch.arange(skipped + 1, length + 1).double()[:, None]
        parts = (kept[0], kept.mean(0), kept.amax(0), kept.sum(0) / len(kept) ** 0.5, (kept * weights).sum(0) / weights.sum())
        vectors.append(torch.cat([*parts, kept[-1]]).float())
        start += length
    return torch.stack(vectors)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([31, 32, 33, 64, 65, 200])), min_size=1, max_size=6),
    filler=st.sampled_from([0, 1, 31, 32, 33, 100]),
    prompts=st.lists(st.sampled_from([0, 1, 5, 32, 40, 500]), max_size=6),
    include_prompt=st.booleans(),
    in_parts=st.booleans(),
)
def test_vectors_are_those_of_the_definition(
    lengths: list[int], filler: int, prompts: list[int], include_prompt: bool, in_parts: bool
) -> None:
    """Filler is NaN; inputs behind the prompts are dummies."""
    rows = sum(lengths) + filler
    hidden = torch.from_numpy(np.random.default_rng(7).standard_normal((rows, WIDTH)).astype(np.float32))
    hidden[sum(lengths) :] = torch.nan
    prompts = prompts[: len(lengths)]
    found = pooled(hidden, prompts, lengths, include_prompt=include_prompt, in_parts=in_parts)
    expected = by_definition(hidden, prompts, lengths, include_prompt=include_prompt)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("place", [0, 33, 69])
def test_a_row_that_is_not_finite_spoils_its_own_input_only(in_parts: bool, place: int) -> None:
    hidden = torch.ones(140, WIDTH)
    hidden[place] = torch.nan
    found = pooled(hidden, [], [70, 70], include_prompt=True, in_parts=in_parts)
    assert bool(torch.isfinite(found[1]).all())
    means = found[0, WIDTH : 5 * WIDTH]
    assert not bool(torch.isfinite(means).any())


def test_sizes_follow_from_the_shape_alone() -> None:
    pooling = Pooling(modes=("mean",))
    sizes = set()
    for lengths in ([70, 1, 1], [24, 24, 24], [1, 1, 1]):
        layout = layout_of(lengths)
        arrays = pool_arrays([], layout, Shape(100, 3, 70), pooling, in_parts=True)
        sizes.add(tuple((name, array.shape, array.dtype) for name, array in arrays.items()))
    assert len(sizes) == 1
