"""Captures the graphs of a model at its start, the largest first, and compares each with the eager forward.

Nothing is captured later, so that no request waits for it and memory does not grow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packhorse_shared.extra_inputs import EncodeExtraInputSpec
from packhorse_worker.backend import DeviceLostError
from packhorse_worker.engine.batch import Extra, Input
from packhorse_worker.engine.forward import Arrays
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.graphs.graphs import Graph, Graphs, Recorder
from packhorse_worker.engine.judging import Verdict, find_verdict
from packhorse_worker.engine.lanes.queues import Queues
from packhorse_worker.engine.lanes.staging import Plan
from packhorse_worker.engine.packing import Layout, Shape, layout_of
from packhorse_worker.engine.pipeline import Pipeline
from packhorse_worker.engine.transformer import first_line

log = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.05}
"""How far a replay may be from the eager forward of the same inputs, as a share of the largest value."""


class CaptureError(Exception):
    """Graphs of this model cannot be used. Its text says why."""


@dataclass(frozen=True)
class _Stand:
    """A batch of a shape, all of its rows taken, to be captured with."""

    shape: Shape
    layout: Layout
    inputs: Sequence[Input]


class GraphMaker:
    """Captures the graphs of one pipeline. They share the memory that they read from, and the memory that they compute in."""

    def __init__(
        self,
        pipeline: Pipeline,
        specs: Sequence[EncodeExtraInputSpec],
        recorder: Recorder,
        queues: Queues,
        *,
        vocabulary_rows: int,
        dtype: torch.dtype,
    ) -> None:
        """``pipeline``: one whose attention is graphable. ``dtype``: the transformer's."""
        self._pipeline = pipeline
        self._specs = specs
        self._recorder = recorder
        self._queues = queues
        self._vocabulary_rows = vocabulary_rows
        self._dtype = dtype

    def make(self, buckets: Buckets, progress: Callable[[int], None] | None = None) -> Graphs:
        """A graph for every shape of ``buckets`` for which there is memory. ``progress`` is told how many more are done.

        Raises CaptureError when a forward cannot be captured, or a graph gives something else; DeviceLostError.
        """
        try:
            block, room = self._memory(buckets.shapes)
        except Exception as problem:
            _raise_unless_out_of_memory(problem)
            raise CaptureError("no memory for their inputs") from problem
        graphs: dict[Shape, Graph] = {}
        for shape in buckets.shapes:
            try:
                graphs[shape] = self._make(self._stand(shape), block, room)
            except Exception as problem:
                _raise_unless_out_of_memory(problem)
            if progress is not None:
                progress(1)
        if len(graphs) < len(buckets.shapes):
            missing = {"graphs": len(buckets.shapes) - len(graphs), "of": len(buckets.shapes)}
            log.warning("no memory for some CUDA graphs; their batches run eagerly", extra=missing)
        return Graphs(buckets, graphs, self._recorder.memory_bytes())

    def _make(self, stand: _Stand, block: torch.Tensor, room: Mapping[str, torch.Tensor]) -> Graph:
        arrays = self._arrays(stand)
        plan = Plan.of(arrays)
        host = torch.zeros(plan.nbytes, dtype=torch.uint8)
        plan.write(arrays, host)
        own = block[: plan.nbytes]
        self._queues.compute.copy(own, host)
        tensors = plan.views(own)
        extras = {
            name: room[name][: each.nbytes].view(each.dtype).view(each.shape) for name, each in self._extras(stand).items()
        }

        def forward() -> torch.Tensor:
            return self._pipeline.compute(tensors, None, stand.shape, extras)

        eager = self._recorder.run(forward)
        captured = self._recorder.record(forward)
        difference = _difference(self._recorder.replay(captured), eager)
        if not difference <= _TOLERANCES[self._dtype]:
            raise CaptureError(
                f"the graph for {stand.shape.batch_size} inputs of {stand.shape.num_tokens} tokens gives outputs that "
                f"differ by {difference:.2g} of the largest value"
            )
        return Graph(stand.shape, self._pipeline, own, extras, captured)

    def _stand(self, shape: Shape) -> _Stand:
        """Inputs of about the same length that take all rows; none is longer than the shape allows."""
        least, more = divmod(shape.num_tokens, shape.batch_size)
        layout = layout_of([least + 1] * more + [least] * (shape.batch_size - more))
        ids = (np.arange(shape.num_tokens) % self._vocabulary_rows).astype(np.int32)
        inputs = [
            Input(ids[start : start + length], extras={spec.name: self._zeros(spec, length) for spec in self._specs})
            for start, length in zip(layout.starts.tolist(), layout.lengths, strict=True)
        ]
        return _Stand(shape, layout, inputs)

    def _zeros(self, spec: EncodeExtraInputSpec, tokens: int) -> Extra:
        """What one input of the stand has of a declared tensor."""
        dtype = getattr(torch, spec.handed_dtype(str(self._dtype).removeprefix("torch.")))
        return Extra(torch.zeros(spec.sizes(tokens, 1), dtype=dtype), spec.axis, spec.per)

    def _arrays(self, stand: _Stand) -> Arrays:
        return self._pipeline.arrays(stand.inputs, stand.layout, stand.shape)

    def _extras(self, stand: _Stand) -> dict[str, torch.Tensor]:
        return self._pipeline.transform.extras(stand.inputs, stand.shape)

    def _memory(self, shapes: Sequence[Shape]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Memory on the device for the arrays and, by name, for the declared tensors, each large enough for any of the shapes.
        Declared tensors are zeros."""
        largest, most = 0, dict[str, int]()
        for shape in shapes:
            stand = self._stand(shape)
            largest = max(largest, Plan.of(self._arrays(stand)).nbytes)
            for name, each in self._extras(stand).items():
                most[name] = max(most.get(name, 0), each.nbytes)
        block = self._queues.on_device(largest)
        room = {name: self._queues.on_device(nbytes) for name, nbytes in most.items()}
        for each in room.values():
            self._queues.compute.run(each.zero_)
        return block, room


def _raise_unless_out_of_memory(problem: Exception) -> None:
    """Raise what a capture that failed means for all graphs: nothing where there was no memory for one."""
    if isinstance(problem, CaptureError):
        raise problem
    said = f"{type(problem).__name__}: {first_line(problem)}"
    match find_verdict(problem):
        case Verdict.DEVICE_LOST:
            raise DeviceLostError(said) from problem
        case Verdict.THIS_CALL:
            raise CaptureError(said) from problem


def _difference(values: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest value, NaN where only the eager forward gave a finite one. Of what is
    not finite there nothing can be told."""
    known = torch.isfinite(expected)
    values, expected = values[known], expected[known]
    if not len(expected):
        return 0.0
    return float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
