"""The memory of a batch follows its tokens, whatever their spread over its inputs."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.runner import Runner
from reference import runner_of
from tiny_families import build_family
from tiny_models import build_t

LONGEST, SHORT = 512, 8
BUDGET = 768


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are still referred to; ``peak`` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if _has_storage(each)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if _has_storage(each):
                place = each.untyped_storage().data_ptr()
                if place in self._live or place not in given:  # views of weights are not counted
                    self._live[place] += 1
                    self._sizes[place] = each.untyped_storage().nbytes()
                    weakref.finalize(each, self._dead, place)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result

    def _dead(self, place: int) -> None:
        self._live[place] -= 1
        if self._live[place] <= 0:
            del self._live[place]
            self._sizes.pop(place, None)


def _has_storage(each: Any) -> bool:
    return isinstance(each, torch.Tensor) and not each.is_mkldnn  # prepacked weights have none


def peak_bytes(runner: Runner, lengths: list[int]) -> int:
    inputs = [Input(np.arange(10, 10 + length, dtype=np.int32) % 100) for length in lengths]
    with LiveBytes() as live:
        assert runner.run(inputs).failures == []
    return live.peak


@pytest.mark.parametrize("name", ["bert", "deberta-v2"])
def test_one_long_input_among_short_ones_costs_no_more_than_the_budget(tmp_path: Path, name: str) -> None:
    """Packed and padded: 32 rows as long as the longest would be 16,384 tokens."""
    if name == "bert":
        folder = build_t(tmp_path / name, max_position_embeddings=LONGEST)
    else:
        folder = build_family(tmp_path / name, name, max_position_embeddings=LONGEST)
    runner = runner_of(folder, max_num_tokens=BUDGET, max_seq_len=LONGEST)
    assert runner.pipeline.is_packed == (name == "bert")
    mixed = peak_bytes(runner, [LONGEST, *[SHORT] * 31])
    alone = peak_bytes(runner, [LONGEST])
    whole = peak_bytes(runner, [SHORT] * (BUDGET // SHORT))
    assert alone <= mixed <= 1.2 * max(alone, whole)


def test_a_batch_of_any_size_stays_within_the_budget(tmp_path: Path) -> None:
    runner = runner_of(build_t(tmp_path / "t", max_position_embeddings=LONGEST), max_num_tokens=BUDGET)
    few = peak_bytes(runner, [BUDGET // 8] * 8)
    many = peak_bytes(runner, [BUDGET // 8] * 64)
    vectors = 64 * 32 * 4
    assert many <= few + 4 * vectors
