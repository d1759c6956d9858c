"""Makes graphs of tiny models on a simulated device, and compares what they give with eager forwards."""

# ruff: noqa: PLR0917 - operations of torch take their arguments by position

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels import attention, in_float32
from packhorse_shared.extra_inputs import EncodeExtraInputSpec
from packhorse_shared.graph_config import EncodeCudaGraphConfig
from packhorse_worker.engine.attention.kernels import Kernel
from packhorse_worker.engine.attention.rectangle import Rectangle
from packhorse_worker.engine.attention.varlen import Varlen
from packhorse_worker.engine.attention.way import Way
from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.graphs.graphs import Graphs
from packhorse_worker.engine.graphs.recording import GraphMaker
from packhorse_worker.engine.lanes.lane import How, QueuedLane
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.runner import Runner
from simulated_device import SimulatedQueues, TapeRecorder
from tiny_models import ROWS

NEAR = 2e-5
"""Graphs attend to a rectangle, eager forwards to runs of inputs: other roundings."""
CONFIG = EncodeCudaGraphConfig(batch_sizes=[1, 4], num_tokens=[12, 32], seq_lens=[12], enable_padding=True)
LENGTHS = [(5, 3, 1), (12,), (1,), (12, 12, 4), (1, 1, 1, 1), (9, 7, 11, 2), (2, 10)]
"""With dummies, filler, both, or neither."""


@torch.library.custom_op("packhorse_tests::attention", mutates_args=())
def whole_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    left: int,
    right: int,
    scale: float,
) -> torch.Tensor:
    """The reference kernel as one operation, which is what CUDA's are to a graph."""
    return attention((query, key, value), (offsets, offsets), (longest, longest), (left, right), scale)


@whole_attention.register_fake
def _(query: torch.Tensor, key: Any, value: Any, offsets: Any, longest: int, left: int, right: int, scale: float) -> Any:
    return torch.empty_like(query)


def _call(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets: torch.Tensor,
    longest: int,
    reach: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    found: torch.Tensor = whole_attention(*tensors, offsets, longest, *reach, scale)
    return found


KERNEL = in_float32(Kernel("reference", _call, takes_window=True, takes_scale=True, shares_heads=True))
WAYS: dict[str, Way] = {"rectangle": Rectangle(), "varlen": Varlen(KERNEL)}


@dataclass
class Made:
    pipeline: Pipeline
    queues: SimulatedQueues
    recorder: TapeRecorder
    maker: GraphMaker


def maker_of(
    runner: Runner,
    way: Way | None = None,
    specs: Sequence[EncodeExtraInputSpec] = (),
    breaks: Callable[[str, int], None] = lambda _what, _number: None,
    queues: SimulatedQueues | None = None,
) -> Made:
    """What records the graphs of a model."""
    forward = runner.pipeline.transform
    assert isinstance(forward, PackedForward)
    pipeline = runner.pipeline.with_forward(forward.attending(way or Rectangle()))
    queues = queues or SimulatedQueues()
    recorder = TapeRecorder(queues, breaks)
    maker = GraphMaker(pipeline, specs, recorder, queues, vocabulary_rows=ROWS, dtype=torch.float32)
    return Made(pipeline, queues, recorder, maker)


def inputs_of(lengths: Sequence[int], seed: int = 0, first_id: int = 0) -> list[Input]:
    random = np.random.default_rng(seed)
    return [
        Input(random.integers(first_id, ROWS, each).astype(np.int32), int(random.integers(0, each + 1))) for each in lengths
    ]


def check_lane(lane: QueuedLane, pipeline: Pipeline, batch: Sequence[Input], *, replays: TapeRecorder | None = None) -> None:
    before = sum(tape.replays for tape in replays.tapes) if replays else 0
    expected = pipeline.forward(batch)
    assert bool(torch.isfinite(expected).all())
    found = lane.launch(batch, How()).land()
    torch.testing.assert_close(found, expected, rtol=NEAR, atol=NEAR)
    if replays:
        assert sum(tape.replays for tape in replays.tapes) == before + 1


def check_batches(runner: Runner, made: Made, graphs: Graphs, batches: Sequence[Sequence[Input]]) -> None:
    """Each in a graph, with garbage in all memory before."""
    lane = QueuedLane(runner.pipeline, made.queues, graphs)
    for batch in batches:
        check_lane(lane, runner.pipeline, batch, replays=made.recorder)
        made.queues.scribble()


def raising(what: str, number: int, problem: Exception) -> Callable[[str, int], None]:
    """For ``TapeRecorder.breaks``."""

    def breaks(met: str, count: int) -> None:
        if (met, count) == (what, number):
            raise problem

    return breaks
