"""A forward takes nothing from the host: on the device "meta" there are no values, and what lies elsewhere cannot be combined.

A tensor that a model makes on the host within its forward costs a wait on a GPU, and keeps the model from having CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from packhorse_worker.engine import load
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.packing import Shape, layout_of
from packhorse_worker.engine.runner import Runner
from reference import runner_of
from tiny_families import FAMILIES, PADDED, build_family
from tiny_heads import HEADS, build_causal_reranker, build_head
from tiny_models import build_t

LENGTHS, SHAPE = [5, 3, 1, 1], Shape(num_tokens=16, batch_size=5, seq_len=8)


class _OnDeviceOnly(TorchDispatchMode):
    """Refuses every operation that reads or makes a tensor of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, found)) if isinstance(each, torch.Tensor)}
        assert "cpu" not in devices, f"{func} on the host"
        return found


@pytest.fixture(autouse=True)
def _plain_linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those prepared for a CPU stay there."""
    monkeypatch.setattr(load, "prepack_linears", lambda *_: 0)


def computed_on_meta(runner: Runner) -> torch.Tensor:
    """The outputs of a padded shape, without values."""
    packed = runner.pipeline.transform
    assert isinstance(packed, PackedForward)
    pipeline = runner.pipeline.with_forward(packed.attending(Rectangle()))
    inputs = [Input(np.arange(8, 8 + length, dtype=np.int32)) for length in LENGTHS]
    arrays = pipeline.arrays(inputs, layout_of([*LENGTHS, 1]), SHAPE)
    readout: Any = pipeline._readout
    for module in (packed._transformer, getattr(readout, "_parts", None), getattr(readout, "_head", None)):
        if module is not None:
            getattr(module, "_model", module).to("meta")
    tensors = {name: torch.from_numpy(each).to("meta") for name, each in arrays.items()}
    with _OnDeviceOnly():
        return pipeline.compute(tensors, None, SHAPE, {})


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - PADDED))
def test_a_forward_takes_nothing_from_the_host(tmp_path: Path, name: str) -> None:
    if not hasattr(transformers, FAMILIES[name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {FAMILIES[name][0]}")
    # In float32 torch multiplies experts one by one, and reads back how many tokens each one has.
    runner = runner_of(build_family(tmp_path / name, name), dtype="bfloat16" if name == "qwen3-moe" else "float32")
    found = computed_on_meta(runner)
    assert (found.shape[0], found.device.type) == (SHAPE.batch_size, "meta")


@pytest.mark.parametrize("name", [name for name in HEADS if not any(name.startswith(each) for each in PADDED)])
def test_neither_does_a_head(tmp_path: Path, name: str) -> None:
    found = computed_on_meta(runner_of(build_head(tmp_path / name, name)))
    assert (found.shape[0], found.device.type) == (SHAPE.num_tokens if "token" in name else SHAPE.batch_size, "meta")


def test_neither_does_a_language_models_head(tmp_path: Path) -> None:
    found = computed_on_meta(runner_of(build_causal_reranker(tmp_path / "model")))
    assert (found.shape, found.device.type) == ((SHAPE.batch_size, 1), "meta")


@pytest.mark.parametrize("pooling", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_neither_does_pooling(tmp_path: Path, pooling: str) -> None:
    found = computed_on_meta(runner_of(build_t(tmp_path / "model", pooling=(pooling,))))
    assert (found.shape[0], found.device.type) == (SHAPE.batch_size, "meta")


def test_the_watch_sees_what_it_should() -> None:
    values = torch.ones(3, device="meta")
    for bad in (lambda: values + torch.ones(()), lambda: torch.arange(3).to("meta")):
        with pytest.raises(AssertionError, match="on the host"), _OnDeviceOnly():
            bad()
