"""Where the tests of this folder run, and what they share.

``GPU_TESTS_ON=cpu pytest tests/gpu`` runs those of the engine on a CPU, where all but what is CUDA's own must hold too: so a
mistake in a test is found before there is a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from packhorse import EncodeCudaGraphConfig, Encoder
from packhorse_shared.devices import find_devices
from packhorse_shared.messages import EncodeOptions
from tiny_families import FAMILIES

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
IS_CUDA = DEVICE != "cpu"
GPUS = [word for word in find_devices(("auto",), os.environ).words if word != "cpu"]

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    # Of libraries in other versions than the pinned ones, and of torch itself: of its mode that refuses synchronization.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(IS_CUDA and not GPUS, reason="no CUDA device on this machine"),
]
"""The marks of tests of the engine."""
only_cuda = pytest.mark.skipif(not IS_CUDA, reason="about CUDA itself")

FLOAT32_ONLY_ON_CPU = {"xlnet", "fnet"}
"""transformers' code for them does not run in bfloat16 on a CPU."""
TOLERANCE = 1e-3
"""In float32."""
TOLERANCES = {"convbert": 0.02, "deberta-v2": 0.02}
"""Of families with convolutions, which torch computes in TF32 unless it is told otherwise."""
LONGEST, MOST_INPUTS, MOST_TOKENS = 64, 8, 256
GRAPHS = EncodeCudaGraphConfig(
    batch_sizes=[1, MOST_INPUTS], num_tokens=[16, LONGEST, MOST_TOKENS], seq_lens=[16, LONGEST], enable_padding=True
)
SHAPES = ((1,), (3,), (16,), (60,), (5, 1), (9, 2, 30, 7), (1, 1, 1, 1, 1), (60, 60, 60), (12, 40, 3, 3, 3, 25, 7, 60))
"""Lengths of batches that fit a graph of ``GRAPHS``: alone and in company, exactly and with room left."""

Ids = list[NDArray[np.int32]]


def known(name: str) -> None:
    """Skip a family that the installed transformers does not have."""
    if not hasattr(transformers, FAMILIES[name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {FAMILIES[name][0]}")


def encoder_of(folder: Path, *, graphs: bool = False, dtype: str = "float32", device: str = DEVICE, **more: Any) -> Encoder:
    """With or without graphs, and the limits that ``GRAPHS`` is made for."""
    limits: dict[str, Any] = {"max_batch_size": MOST_INPUTS, "max_num_tokens": MOST_TOKENS, **more}
    config = GRAPHS if graphs else None
    return Encoder(folder, dtype=dtype, device=device, cuda_graph_config=config, show_progress=False, **limits)


def ids_with(lengths: Sequence[int], seed: int = 7) -> Ids:
    """Token ids of tiny models: of every length, all different."""
    random = np.random.default_rng(seed)
    return [random.integers(10, 99, length).astype(np.int32) for length in lengths]


def rows_of(encoder: Encoder, ids: Ids, **options: Any) -> torch.Tensor:
    """The outputs of one call, on the CPU, (inputs, dimension) or (tokens, width)."""
    return encoder.encode(ids, return_raw_logits=True, **options).cpu()


def batch_of(encoder: Encoder, ids: Ids) -> Any:
    """Start a worker's batch; call what it gives for its ``EncodedBatch``."""
    return encoder.start_batch(ids, [EncodeOptions()] * len(ids))


def smallest_cosine(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(found.float(), wanted.float(), dim=1).min())


class Replays:
    """How often a CUDA graph was replayed."""

    def __init__(self) -> None:
        self.count = 0


@contextmanager
def counting_replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    """Counts them; replays go on as they are."""
    replays = Replays()
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.count += 1
        replay(graph)

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        yield replays
