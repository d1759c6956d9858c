"""Graphs are recorded at a start, the largest first; what cannot be recorded, or gives other numbers, is not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from packhorse_shared.graph_config import EncodeCudaGraphConfig
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.graphs.graphs import Graph
from packhorse_worker.engine.graphs.recording import CaptureError
from packhorse_worker.engine.lanes.lane import QueuedLane
from packhorse_worker.engine.packing import Shape, layout_of
from packhorse_worker.engine.runner import Runner
from recorded_graphs import CONFIG, LENGTHS, check_lane, inputs_of, maker_of, raising
from reference import runner_of
from tiny_models import build_n, build_t


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return runner_of(build_t(tmp_path_factory.mktemp("graphs") / "t"))


def test_all_are_recorded_the_largest_first_and_share_their_memory(bert: Runner) -> None:
    made = maker_of(bert)
    config = EncodeCudaGraphConfig(max_batch_size=8, max_num_token=64, max_seq_len=32, enable_padding=True)
    buckets = Buckets.of(config, 32, 8192, 64)
    told: list[int] = []
    graphs = made.maker.make(buckets, told.append)
    assert len(graphs) == len(buckets.shapes) == sum(told) >= 10
    assert made.recorder.counts == dict.fromkeys(("run", "record", "replay"), len(graphs) - 1)
    assert graphs.memory_bytes == made.recorder.memory_bytes()
    found = list(graphs._graphs.values())
    assert [each.shape for each in found] == sorted(buckets.shapes, reverse=True)
    assert len({each.block.data_ptr() for each in found}) == 1
    assert len(made.queues.blocks) == 1
    assert len({each.block.numel() for each in found}) > 1


def test_a_shape_without_memory_is_left_out_with_one_warning(bert: Runner, caplog: pytest.LogCaptureFixture) -> None:
    def breaks(what: str, number: int) -> None:
        if (what, number) in {("run", 0), ("record", 0)}:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    made = maker_of(bert, breaks=breaks)
    buckets = Buckets.of(CONFIG, 8, 64, 20)
    told: list[int] = []
    with caplog.at_level(logging.WARNING):
        graphs = made.maker.make(buckets, told.append)
    assert len(graphs) == len(buckets.shapes) - 2 == 1
    assert sum(told) == len(buckets.shapes)
    assert [(record.message, record.graphs, record.of) for record in caplog.records if "packhorse" in record.name] == [  # type: ignore[attr-defined]
        ("no memory for some CUDA graphs; their batches run eagerly", 2, len(buckets.shapes))
    ]
    lane = QueuedLane(bert.pipeline, made.queues, graphs)
    for seed, lengths in enumerate(LENGTHS):
        check_lane(lane, bert.pipeline, inputs_of(lengths, seed))


@pytest.mark.parametrize("what", ["run", "record", "replay"])
def test_any_other_failure_refuses_all_graphs(bert: Runner, what: str) -> None:
    made = maker_of(bert, breaks=raising(what, 1, ValueError("planted\nmore")))
    with pytest.raises(CaptureError, match=r"^ValueError: planted$"):
        made.maker.make(Buckets.of(CONFIG, 8, 64, 20))


@pytest.mark.parametrize("what", ["run", "record", "replay"])
def test_a_lost_device_is_told_as_such(bert: Runner, what: str) -> None:
    problem = RuntimeError("CUDA error: an illegal memory access was encountered")
    made = maker_of(bert, breaks=raising(what, 0, problem))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        made.maker.make(Buckets.of(CONFIG, 8, 64, 20))


def test_no_memory_for_the_inputs_of_graphs(bert: Runner) -> None:
    made = maker_of(bert)

    def breaks(point: str) -> None:
        if point == "on device":
            raise torch.OutOfMemoryError("CUDA out of memory")

    made.queues.breaks = breaks
    with pytest.raises(CaptureError, match="no memory"):
        made.maker.make(Buckets.of(CONFIG, 8, 64, 20))


@pytest.mark.parametrize("change", [lambda found: found * 1.01, lambda found: found * torch.nan, torch.zeros_like])
def test_a_replay_that_gives_other_numbers_is_refused(bert: Runner, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    made = maker_of(bert)
    replay = made.recorder.replay
    made.recorder.replay = lambda captured: change(replay(captured))  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="gives outputs that differ by"):
        made.maker.make(Buckets.of(CONFIG, 8, 64, 20))


def test_what_is_not_finite_anyway_hides_nothing_else(tmp_path: Path) -> None:
    """One row of a model's table is not-a-number: the other inputs of its batch are still compared."""
    runner = runner_of(build_n(tmp_path / "n"))
    config = EncodeCudaGraphConfig(batch_sizes=[8], num_tokens=[112], seq_lens=[16], enable_padding=True)
    made = maker_of(runner)
    assert len(made.maker.make(Buckets.of(config, 8, 128, 20))) == 1
    made = maker_of(runner)
    replay = made.recorder.replay
    made.recorder.replay = lambda captured: replay(captured) * 1.01  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="differ by"):
        made.maker.make(Buckets.of(config, 8, 128, 20))


class ReadsBack(PackedForward):
    """A transformer that looks at a value."""

    look: Callable[[torch.Tensor], object] = staticmethod(lambda _tensor: None)

    def __call__(self, tensors: Any, layout: Any, shape: Any, arguments: Any) -> torch.Tensor:
        hidden = super().__call__(tensors, layout, shape, arguments)
        type(self).look(hidden)
        return hidden


LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda hidden: hidden[0, 0].item(),
    "if": lambda hidden: bool((hidden > 0).any()),
    "nonzero": lambda hidden: (hidden > 0).nonzero(),
    "mask": lambda hidden: hidden[hidden > 0],
    "assign by mask": lambda hidden: hidden.index_put_((hidden > 0,), torch.zeros(())),
    "masked_select": lambda hidden: hidden.masked_select(hidden > 0),
    "unique": lambda hidden: hidden.unique(),
    "counts": lambda hidden: hidden.repeat_interleave(torch.ones(len(hidden)).long(), 0),
    "host data": lambda _hidden: torch.tensor([1, 2, 3]),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_value_that_is_looked_at_is_refused(bert: Runner, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is: the tests above would see it."""
    monkeypatch.setattr(ReadsBack, "look", staticmethod(LOOKS[look]))
    forward = bert.pipeline.transform
    assert isinstance(forward, PackedForward)
    made = maker_of(
        Runner(
            bert.pipeline.with_forward(ReadsBack(forward._transformer, forward.way)),
            bert.lane,
            bert.facts,
            bert.limits,
            bert._grouping,
        )
    )
    with pytest.raises(CaptureError, match="ReadBackError"):
        made.maker.make(Buckets.of(CONFIG, 8, 64, 20))


def test_a_graph_fills_a_batch_up_with_dummies() -> None:
    tensor = torch.empty(0)
    stand_in: Any = None
    graph = Graph(Shape(16, 4, 8), stand_in, tensor, {}, stand_in)
    assert graph.filled(layout_of([5, 5])).lengths == (5, 5, 1, 1)
    full = layout_of([1, 2, 3, 4])
    assert graph.filled(full) is full
