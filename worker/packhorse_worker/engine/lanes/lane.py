"""The lane of a device that computes while the host goes on: inputs go up, outputs come down, both beside the forward.

A flight is one forward on its way. Its inputs are written into pinned memory, go up in one copy, and the forward waits for
them on the device; its outputs are set aside there, since the next forward may use their memory, and come down beside it. The
host waits for one mark in a flight, the last one. Two flights can be under way, each in a slot of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from packhorse_worker.engine.batch import Input
from packhorse_worker.engine.forward import Tensors
from packhorse_worker.engine.graphs.graphs import Graph, Graphs
from packhorse_worker.engine.lanes.queues import Mark, Queues
from packhorse_worker.engine.lanes.staging import Plan, room_for
from packhorse_worker.engine.packing import Layout, Shape, layout_of
from packhorse_worker.engine.pipeline import Pipeline

FLIGHTS = 2
"""Under way at once: one that computes, one that is ready to. A third would wait for nothing but the first."""
_FLOAT_BYTES = 4
_MOST_PLACES = 256


@dataclass(frozen=True)
class How:
    """What a forward is asked for, besides its inputs."""

    per_token: bool = False
    """A row for each token instead of each input."""
    constants: Mapping[str, Any] | None = None
    """Handed to the transformer as they are."""
    to_host: bool = True
    """Outputs are wanted on the host."""


class Flight(Protocol):
    """A forward on its way."""

    def land(self) -> torch.Tensor:
        """Wait for its outputs: float32, a row for each input, or token if that was asked for.

        May be called by several threads, and again. Raises what the device raised on the way.
        """


class Lane(Protocol):
    """A way to the device and back."""

    overlaps: bool
    """Whether a flight goes on while the host does something else."""

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def launch(self, inputs: Sequence[Input], how: How) -> Flight:
        """Send inputs off, at least one, none empty, all with the same extras. Raises what the forward raises."""


@dataclass(frozen=True)
class Landed:
    """A flight that was over when it began."""

    outputs: torch.Tensor

    def land(self) -> torch.Tensor:
        """See ``Flight``."""
        return self.outputs


class DirectLane:
    """The lane of a device that is the host."""

    overlaps = False

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def settle(self) -> None:
        """See ``Lane``."""

    def launch(self, inputs: Sequence[Input], how: How) -> Landed:
        """See ``Lane``."""
        outputs = self._pipeline.forward(inputs, per_token=how.per_token, constants=how.constants)
        return Landed(outputs.cpu() if how.to_host else outputs)


class QueuedLane:
    """The lane of a device with queues of its own. For one thread at a time; flights may land in others."""

    overlaps = True

    def __init__(self, pipeline: Pipeline, queues: Queues, graphs: Graphs | None = None) -> None:
        self._pipeline = pipeline
        self.queues = queues
        self._slots = [_Slot(queues) for _ in range(FLIGHTS)]
        self._launched = 0
        self.graphs = graphs

    def use(self, graphs: Graphs) -> None:
        """Run batches in graphs from now on, where one fits. Makes room for the inputs of all of them."""
        self._make_room(self._slots[0], graphs.block_bytes, 0)
        self.graphs = graphs

    def settle(self) -> None:
        """See ``Lane``."""
        for slot in self._slots:
            slot.vacate()

    def launch(self, inputs: Sequence[Input], how: How) -> Flight:
        """See ``Lane``. The flight that had the slot lands first, if it has not yet."""
        slot = self._slots[self._launched % FLIGHTS]
        self._launched += 1
        slot.vacate()
        try:
            return self._launch(inputs, how, slot)
        except BaseException:
            # What was put into the queues before still reads the slot, and writes to it.
            for queue in (self.queues.up, self.queues.compute, self.queues.down):
                queue.mark().wait()
            raise

    def _launch(self, inputs: Sequence[Input], how: How, slot: _Slot) -> _QueuedFlight:
        layout = layout_of([len(each.ids) for each in inputs])
        graph = self._find_graph(layout, inputs[0], how)
        pipeline = self._pipeline if graph is None else graph.pipeline
        shape = pipeline.transform.shape(layout) if graph is None else graph.shape
        placed = layout if graph is None else graph.filled(layout)
        arrays = pipeline.arrays(inputs, placed, shape)
        plan = Plan.of(arrays)
        lent = {**(how.constants or {}), **pipeline.transform.extras(inputs, shape)}
        if lent:
            self.queues.finish_callers()
        gives_tokens = self._pipeline.gives_tokens(per_token=how.per_token)
        rows = layout.tokens if gives_tokens else len(inputs)
        width = self._pipeline.width(per_token=how.per_token)
        self._make_room(slot, plan.nbytes, rows * width * _FLOAT_BYTES)
        places, (outputs, landing) = slot.places(plan), slot.outputs(rows, width)
        for name, room in places.rooms.items():
            room[...] = arrays[name]
        up, compute, down = self.queues.up, self.queues.compute, self.queues.down
        up.copy(places.device, places.host)
        compute.after(up.mark())
        if graph is None:
            forward = _Forward(places.tensors, layout, shape, lent, how.per_token)
            compute.run(lambda: self._run_eagerly(forward, outputs))
        else:
            compute.run(lambda: graph.replay_into(outputs, places.device, lent))
        computed = compute.mark()
        if not how.to_host:
            slot.flight = flight = _QueuedFlight(computed, lambda: self._own_copy(outputs))
        else:
            down.after(computed)
            down.copy(landing, outputs)
            slot.flight = flight = _QueuedFlight(down.mark(), landing.clone)
        if lent or not how.to_host:
            flight.land()  # what the caller lent is its own again, and what it gets is ready
        return flight

    def _make_room(self, slot: _Slot, in_bytes: int, out_bytes: int) -> None:
        """Have room for so many bytes of inputs and outputs: where this slot has none, make some in all slots, so that after a
        warm-up in any of them nothing is allocated."""
        if slot.has_room(in_bytes, out_bytes):
            return
        for each in self._slots:
            each.vacate()
            each.make_room(in_bytes, out_bytes)

    def _own_copy(self, outputs: torch.Tensor) -> torch.Tensor:
        copy = outputs.clone()
        self.queues.finish_callers()
        return copy

    def _find_graph(self, layout: Layout, first: Input, how: How) -> Graph | None:
        if self.graphs is None or how.constants or (how.per_token and not self._pipeline.is_per_token):
            return None
        return self.graphs.find(layout, {name for name in first.extras if not self._pipeline.transform.makes(name)})

    def _run_eagerly(self, forward: _Forward, outputs: torch.Tensor) -> None:
        lent = {name: _onto(outputs.device, each) for name, each in forward.lent.items()}
        found = self._pipeline.compute(forward.tensors, forward.layout, forward.shape, lent, per_token=forward.per_token)
        _set_aside(found, outputs)


@dataclass(frozen=True)
class _Forward:
    tensors: Tensors
    layout: Layout
    shape: Shape
    lent: Mapping[str, Any]
    """The caller's tensors and constants, for the transformer."""
    per_token: bool


class _QueuedFlight:
    """A flight that a mark ends."""

    def __init__(self, mark: Mark, collect: Callable[[], torch.Tensor]) -> None:
        self._mark = mark
        self._collect: Callable[[], torch.Tensor] | None = collect
        self._lock = threading.Lock()
        self._outputs: torch.Tensor | None = None
        self._problem: Exception | None = None

    def land(self) -> torch.Tensor:
        """See ``Flight``. The outputs are a copy, so that the slot can be used again."""
        with self._lock:
            if self._collect is not None:
                try:
                    self._mark.wait()
                    self._outputs = self._collect()
                except Exception as problem:
                    self._problem = problem
                self._collect = None  # not before: whoever is interrupted in the wait leaves a slot that is taken
            if self._problem is not None:
                raise self._problem
            assert self._outputs is not None
            return self._outputs


@dataclass(frozen=True)
class _Places:
    """Where the arrays of a plan lie in a slot: all of them together, and one by one."""

    host: torch.Tensor
    device: torch.Tensor
    rooms: Mapping[str, NDArray[Any]]
    """On the host."""
    tensors: Tensors
    """On the device."""


class _Slot:
    """Memory for one flight at a time: its inputs and outputs, on the host and on the device."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self.flight: _QueuedFlight | None = None
        """Who has the slot."""
        self._host_in = self._device_in = torch.empty(0, dtype=torch.uint8)
        self._host_out = self._device_out = torch.empty(0, dtype=torch.float32)
        self._places: dict[Plan, _Places] = {}
        """Of the latest plans: cutting memory up takes as long as filling it."""

    def vacate(self) -> None:
        """Wait until the slot is free. What its flight ran into is for who asked for it."""
        if self.flight is not None:
            with suppress(Exception):
                self.flight.land()
            self.flight = None

    def has_room(self, in_bytes: int, out_bytes: int) -> bool:
        """Whether there is room for so many bytes of inputs and outputs."""
        return self._host_in.nbytes >= in_bytes and self._host_out.nbytes >= out_bytes

    def make_room(self, in_bytes: int, out_bytes: int) -> None:
        """Have room for so many bytes of inputs and outputs; the slot must be free."""
        if self._host_in.nbytes < in_bytes:
            self._host_in, self._device_in = self._blocks(in_bytes)
            self._places.clear()
        if self._host_out.nbytes < out_bytes:
            self._host_out, self._device_out = (block.view(torch.float32) for block in self._blocks(out_bytes))

    def places(self, plan: Plan) -> _Places:
        """Where the inputs go."""
        found = self._places.get(plan)
        if found is None:
            if len(self._places) == _MOST_PLACES:
                self._places.clear()
            host, device = self._host_in[: plan.nbytes], self._device_in[: plan.nbytes]
            self._places[plan] = found = _Places(host, device, plan.rooms(host), plan.views(device))
        return found

    def outputs(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the outputs are set aside on the device, and where they come down."""
        size, strides = (rows, width), (width, 1)
        return self._device_out.as_strided(size, strides), self._host_out.as_strided(size, strides)

    def _blocks(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        room = room_for(nbytes)
        blocks = self._queues.on_host(room), self._queues.on_device(room)
        self._queues.up.after(self._queues.compute.mark())  # see ``on_device``
        return blocks


def _set_aside(found: torch.Tensor, outputs: torch.Tensor) -> None:
    with torch.inference_mode():
        outputs.copy_(found[: len(outputs)])


def _onto(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
