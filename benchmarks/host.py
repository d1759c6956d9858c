"""What the host does for a batch on a GPU worker: ``python benchmarks/host.py [--rounds 15] [--json FILE]``. Needs no GPU.

From ``Encoder.start_batch`` to the launch, and from the landing to the ``EncodedBatch``, with a device that does nothing: its
forward gives zeros, its graphs replay nothing, its queues copy at once and never wait. What is left is Python, numpy and
torch's calls on the host, in microseconds of this thread's CPU time for a batch. CUDA's own calls (streams, events, the launch)
and, eager, the transformer's Python come on top. Cases take turns; each figure is the median of the rounds, each a mean over
200 batches. A few minutes with the defaults. To compare two versions run both in turn: other load moves the figures more than
their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["HF_HUB_OFFLINE"] = "1"

import gpu_environment  # noqa: F401 - finds this checkout
import gpu_models
import numpy as np
import torch

from packhorse_shared.graph_config import EncodeCudaGraphConfig
from packhorse_shared.messages import SEGMENT_SHIFT, EncodeOptions
from packhorse_shared.settings import BatchingSettings, ModelSettings
from packhorse_worker.engine.api.encoder import Encoder
from packhorse_worker.engine.attention.kernels import Kernel
from packhorse_worker.engine.attention.varlen import Varlen
from packhorse_worker.engine.files.model_folder import read_model_folder
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.graphs.recording import GraphMaker
from packhorse_worker.engine.grouping import grouping_of
from packhorse_worker.engine.lanes.lane import QueuedLane
from packhorse_worker.engine.load import Device
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.runner import Runner
from tiny_heads import build_cross_encoder

BATCHES = 200
"""Run for one round of a case."""
_BATCHING = BatchingSettings(max_batch_size=128, max_num_tokens=16384)
_CONFIG = EncodeCudaGraphConfig(
    batch_sizes=[1, 8, 32, 64, 128], num_tokens=[64, 512, 2048, 8192, 16384], seq_lens=[64, 512], enable_padding=True
)
LENGTHS: dict[str, Callable[[np.random.Generator], Sequence[int]]] = {
    "1 x 50": lambda _random: [50],
    "32 x 50": lambda _random: [50] * 32,
    "32 x 8 to 500": lambda random: random.integers(8, 501, 32).tolist(),
    "128 x 64": lambda _random: [64] * 128,
}
"""Tokens of the inputs of a batch."""


class IdleMark:
    """Reached already."""

    def wait(self) -> None:
        pass


class IdleQueue:
    """Does at once what it is asked for."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        with torch.inference_mode():
            into.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> IdleMark:
        return IdleMark()

    def after(self, mark: Any) -> None:
        pass


class IdleQueues:
    """``Queues`` in the host's own memory."""

    def __init__(self) -> None:
        self.up, self.compute, self.down = IdleQueue(), IdleQueue(), IdleQueue()

    def on_host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    on_device = on_host

    def finish_callers(self) -> None:
        pass


@dataclass(frozen=True)
class IdleGraph:
    """``Captured``: nothing."""

    outputs: torch.Tensor

    def replay(self) -> None:
        pass


class IdleRecorder:
    """``Recorder``."""

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        return function()

    def record(self, function: Callable[[], torch.Tensor]) -> IdleGraph:
        return IdleGraph(function())

    def replay(self, captured: Any) -> torch.Tensor:
        found: torch.Tensor = captured.outputs
        return found

    def memory_bytes(self) -> int:
        return 0


_ZEROS = torch.zeros(_BATCHING.max_num_tokens * 16)


def compute_nothing(
    pipeline: Pipeline, _tensors: Any, _layout: Any, shape: Any, _arguments: Any, *, per_token: bool = False
) -> torch.Tensor:
    """In the place of ``Pipeline.compute``."""
    rows, width = shape.batch_size, pipeline.width(per_token=per_token)
    return _ZEROS[: rows * width].view(rows, width)


def encoder_of(folder: Path, *, graphs: bool) -> Encoder:
    """The model of a folder as on a GPU, where nothing is computed."""
    settings = ModelSettings(max_seq_len=512)
    read = read_model_folder(folder, settings)
    encoder = Encoder.from_settings(read, folder.name, settings, _BATCHING, Device(torch.device("cpu"), workers=1))
    runner, queues = encoder._runner, IdleQueues()
    assert runner is not None
    forward = runner.pipeline.transform
    assert isinstance(forward, PackedForward)
    kernel = Kernel("none", lambda *_: torch.empty(0), takes_window=True, takes_scale=True, shares_heads=True)
    pipeline = runner.pipeline.with_forward(forward.attending(Varlen(kernel)))
    lane = QueuedLane(pipeline, queues)
    if graphs:
        rows, dtype = runner.facts.vocabulary_rows, torch.float32
        maker = GraphMaker(pipeline, (), IdleRecorder(), queues, vocabulary_rows=rows, dtype=dtype)
        longest = runner.facts.max_seq_len
        lane.use(maker.make(Buckets.of(_CONFIG, _BATCHING.max_batch_size, _BATCHING.max_num_tokens, longest)))
    grouping = grouping_of("cuda", is_packed=True, pads=False)
    encoder._runner = Runner(pipeline, lane, runner.facts, runner.limits, grouping)
    encoder.overlaps = lane.overlaps
    return encoder


@dataclass(frozen=True)
class Case:
    """Batches of one kind for one encoder."""

    title: str
    encoder: Encoder
    batches: Sequence[tuple[list[Any], list[EncodeOptions]]]

    def measure(self) -> tuple[float, float]:
        """Microseconds for a batch: to the launch, and from the landing."""
        clock, start = time.thread_time_ns, self.encoder.start_batch
        before = after = 0
        for number in range(BATCHES):
            words, options = self.batches[number % len(self.batches)]
            first = clock()
            finish = start(words, options)
            second = clock()
            finish()
            third = clock()
            before += second - first
            after += third - second
        return before / BATCHES / 1000, after / BATCHES / 1000


def batches_of(name: str, encoder: Encoder, *, pairs: bool) -> list[tuple[list[Any], list[EncodeOptions]]]:
    """Some batches, with views of one payload as a worker has them. ``pairs``: the second half of an input is segment 1."""
    random = np.random.default_rng(7)
    made = []
    for _ in range(8):
        lengths = LENGTHS[name](random)
        payload = random.integers(5, encoder.facts.vocabulary_rows, sum(lengths)).astype(np.int32)
        words = np.split(payload, np.cumsum(lengths)[:-1])
        for each in words if pairs else ():
            each[len(each) // 2 :] |= 1 << SEGMENT_SHIFT
        made.append((words, [EncodeOptions(scored=pairs)] * len(lengths)))
    return made


def cases_in(folder: Path) -> list[Case]:
    """Every model, kind of batch, and way to run it."""
    embedder = gpu_models.build("minilm", folder, tiny=False).folder
    reranker = build_cross_encoder(folder / "reranker", "new", max_position_embeddings=512)
    decoder = gpu_models.build("qwen3-0.6b", folder, tiny=True).folder
    cases = []
    for title, model in {"embedder": embedder, "reranker": reranker, "decoder": decoder}.items():
        for graphs in (True, False):
            encoder = encoder_of(model, graphs=graphs)
            for name in LENGTHS if title == "embedder" else list(LENGTHS)[:3]:
                if max(LENGTHS[name](np.random.default_rng(7))) > encoder.max_seq_len:
                    continue
                batches = batches_of(name, encoder, pairs=encoder.facts.segments > 1)
                cases.append(Case(f"{title}, {'graphs' if graphs else 'eager'}, {name}", encoder, batches))
    return cases


def print_table(found: Mapping[str, Sequence[float]]) -> None:
    print(f"{'microseconds a batch':36}{'to the launch':>14}{'from landing':>14}{'in all':>8}")
    for title, (before, after, whole) in found.items():
        print(f"{title:36}{before:14.0f}{after:14.0f}{whole:8.0f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the medians here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, patch.object(Pipeline, "compute", compute_nothing):
        cases = cases_in(Path(folder))
        rounds = [[case.measure() for case in cases] for _ in range(options.rounds + 1)][1:]
    found = {}
    for number, case in enumerate(cases):
        samples = [each[number] for each in rounds]
        before, after, whole = ([each[0] for each in samples], [each[1] for each in samples], [sum(each) for each in samples])
        found[case.title] = [statistics.median(each) for each in (before, after, whole)]
    print_table(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
