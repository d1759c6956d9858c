"""Captured forwards: one for each shape, which reads its inputs where they were when it was captured.

A graph replays the kernels of a forward with one launch instead of hundreds, always at the same addresses. So a batch is copied
to where its graph reads: the arrays of a shape are of the same sizes whatever the batch, and a batch that is smaller than the
shape is filled up with dummies of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

import torch

from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.packing import Layout, Shape, layout_of
from packhorse_worker.engine.pipeline import Pipeline


class Captured(Protocol):
    """A recorded function."""

    @property
    def outputs(self) -> torch.Tensor:
        """What the function gave; written anew by every replay."""

    def replay(self) -> None:
        """Do again what the function did, with what its tensors hold now."""


class Recorder(Protocol):
    """Records functions of tensors at fixed addresses."""

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run it without recording, to the end. Raises what it raises, and RuntimeError where it reads a value back, which
        nothing recorded can do."""

    def record(self, function: Callable[[], torch.Tensor]) -> Captured:
        """Record a function that has run before. Raises what it raises, or that it cannot be recorded."""

    def replay(self, captured: Captured) -> torch.Tensor:
        """Replay, to the end."""

    def memory_bytes(self) -> int:
        """Memory of the device that all recorded functions hold together."""


@dataclass(frozen=True, eq=False)
class Graph:
    """One captured forward."""

    shape: Shape
    pipeline: Pipeline
    """Whose ``arrays`` it reads."""
    block: torch.Tensor
    """Where it reads them: bytes on the device."""
    extras: Mapping[str, torch.Tensor]
    """Where it reads the tensors that calls bring along."""
    captured: Captured

    def filled(self, layout: Layout) -> Layout:
        """The layout with dummies of one token behind its inputs."""
        missing = self.shape.batch_size - len(layout.lengths)
        return layout_of([*layout.lengths, *[1] * missing]) if missing else layout

    def replay_into(self, outputs: torch.Tensor, block: torch.Tensor, extras: Mapping[str, torch.Tensor]) -> None:
        """Write the outputs for these inputs: of what the graph gives, a row for each input of the shape or for each of its
        rows, the first ones, as many as ``outputs`` has."""
        with torch.inference_mode():
            self.block.copy_(block, non_blocking=True)
            for name, own in self.extras.items():
                own.copy_(extras[name], non_blocking=True)
            self.captured.replay()
            outputs.copy_(self.captured.outputs[: outputs.shape[0]])


class Graphs:
    """All captured forwards of a model."""

    def __init__(self, buckets: Buckets, graphs: Mapping[Shape, Graph], memory_bytes: int) -> None:
        self._buckets = buckets
        self._graphs = dict(graphs)
        self.memory_bytes = memory_bytes
        """Memory of the device that they hold."""

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block that a graph reads its arrays from."""
        return max((len(graph.block) for graph in self._graphs.values()), default=0)

    def find(self, layout: Layout, extras: AbstractSet[str]) -> Graph | None:
        """The smallest graph that holds inputs that lie so and bring along tensors of these names; None where none does."""
        shape = self._buckets.find(len(layout.lengths), layout.tokens, layout.longest)
        graph = None if shape is None else self._graphs.get(shape)
        return graph if graph is not None and graph.extras.keys() == extras else None
