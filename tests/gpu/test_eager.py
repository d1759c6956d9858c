"""Eager batches on the device against the CPU, and a device that is out of memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpu.card import (
    FLOAT32_ONLY_ON_CPU,
    IS_CUDA,
    SHAPES,
    TOLERANCE,
    TOLERANCES,
    encoder_of,
    ids_with,
    known,
    on_gpu,
    only_cuda,
    rows_of,
    smallest_cosine,
)
from tiny_families import FAMILIES, build_family

pytestmark = on_gpu

MIB = 1 << 20


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_gives_what_the_cpu_gives(tmp_path: Path, name: str) -> None:
    """Kernels that see too much or too little, and matrix products in a shorter number format than was asked for."""
    known(name)
    folder = build_family(tmp_path / name, name)
    with encoder_of(folder) as here, encoder_of(folder, device="cpu") as cpu:
        for lengths in SHAPES:
            ids = ids_with(lengths)
            assert float((rows_of(here, ids) - rows_of(cpu, ids)).abs().max()) <= TOLERANCES.get(name, TOLERANCE)


FORMATS = [
    *((name, "bfloat16") for name in FAMILIES),
    *((name, "float16") for name in ("bert", "modernbert", "qwen3", "gemma3")),
]


@pytest.mark.parametrize(("name", "dtype"), FORMATS)
def test_shorter_formats_stay_near(tmp_path: Path, name: str, dtype: str) -> None:
    known(name)
    if not IS_CUDA and dtype == "float16":
        pytest.skip("float16 needs a GPU")
    if name in FLOAT32_ONLY_ON_CPU:
        pytest.skip("transformers computes it in float32 in some places, and fails in others")
    folder = build_family(tmp_path / name, name, initializer_range=0.02)
    with encoder_of(folder, dtype=dtype) as near, encoder_of(folder, device="cpu") as exact:
        for lengths in SHAPES:
            ids = ids_with(lengths)
            assert smallest_cosine(rows_of(near, ids), rows_of(exact, ids)) >= 0.997


@pytest.mark.parametrize("name", ["bert", "qwen3", "mistral", "deberta-v2", "convbert"])
def test_the_place_in_the_batch_makes_no_difference(tmp_path: Path, name: str) -> None:
    own, others = ids_with((7,), seed=1), ids_with((3, 30, 7, 12), seed=2)
    with encoder_of(build_family(tmp_path / name, name)) as encoder:
        alone = rows_of(encoder, own)[0]
        for place in range(5):
            found = rows_of(encoder, [*others[:place], *own, *others[place:]])[place]
            assert float((found - alone).abs().max()) <= TOLERANCES.get(name, TOLERANCE)


@only_cuda
def test_a_batch_beyond_the_memory_is_run_in_parts(slow_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Out of memory fails inputs that would fit by themselves, or leaves the allocator in a state that fails all later ones."""
    ids = ids_with((512,) * 64)
    limits = {"max_batch_size": 64, "max_num_tokens": 64 * 512}
    with encoder_of(slow_model, **limits) as encoder:
        wanted = rows_of(encoder, ids)
        with caplog.at_level(logging.WARNING), little_memory(120 * MIB):
            found = rows_of(encoder, ids)
        assert any("going on in halves" in each.getMessage() for each in caplog.records)
        assert float((found - wanted).abs().max()) <= 1e-3
        assert float((rows_of(encoder, ids) - wanted).abs().max()) <= 1e-3


@contextmanager
def little_memory(left: int) -> Iterator[None]:
    """torch's allocator may take no more than what it has now and ``left`` bytes."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + left) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
