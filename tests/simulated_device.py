"""A device whose queues run late, beside each other and in any order that the marks allow; and graphs that are real recordings.

Nothing runs when it is put into a queue. While the host goes on, the device may do some of it, and when the host waits, what it
waits for and perhaps more: a seeded die decides. Memory is garbage until it is written. So a wait that is missing, memory used
again too early or an output read too early gives wrong numbers for some seed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_GARBAGE = (0xAB, 0xFF)
"""As int64 a place far outside, or -1; as float32 a tiny number, or not-a-number."""


@dataclass
class SimulatedMark:
    """Reached when so many pieces of a queue are done."""

    queue: SimulatedQueue
    place: int

    @property
    def is_reached(self) -> bool:
        return self.queue.done >= self.place

    def wait(self) -> None:
        self.queue.device.run_to(self)


class SimulatedQueue:
    """Pieces of work, and marks of others that come before them."""

    def __init__(self, device: SimulatedQueues, name: str) -> None:
        self.device = device
        self.name = name
        self.done = 0
        self.pieces: deque[Callable[[], object] | SimulatedMark] = deque()

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        assert (into.shape, into.dtype) == (source.shape, source.dtype)

        def work() -> None:
            with torch.inference_mode():
                into.copy_(source)

        self.put(work, f"copy {self.name}")

    def run(self, work: Callable[[], object]) -> None:
        self.put(work, f"run {self.name}")

    def mark(self) -> SimulatedMark:
        self.device.meet(f"mark {self.name}")
        return SimulatedMark(self, self.done + len(self.pieces))

    def after(self, mark: SimulatedMark) -> None:
        self.put(mark, f"after {self.name}")

    def put(self, piece: Callable[[], object] | SimulatedMark, point: str) -> None:
        with self.device.lock:
            self.device.meet(point)
            self.pieces.append(piece)
            self.device.go_on()

    @property
    def is_ready(self) -> bool:
        """Whether its next piece may run."""
        head = self.pieces[0] if self.pieces else None
        return head is not None and (not isinstance(head, SimulatedMark) or head.is_reached)

    def step(self) -> None:
        piece = self.pieces[0]
        if not isinstance(piece, SimulatedMark):
            piece()
        self.pieces.popleft()
        self.done += 1


class SimulatedQueues:
    """``Queues``. ``at_once``: the device is always done with everything, and work raises where it is put in."""

    def __init__(self, seed: int = 0, *, at_once: bool = False) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.at_once = at_once
        self.pace = self.random.choice((0.0, 0.0, 0.3, 0.9))
        """How likely the device does another piece while the host goes on."""
        self.is_lazy = self.random.random() < 0.3
        """Whether it does no more than what is waited for."""
        self.up, self.compute, self.down = (SimulatedQueue(self, name) for name in ("up", "compute", "down"))
        self.blocks: list[torch.Tensor] = []
        self.problem: Exception | None = None
        """What work raised late: every wait raises it from then on, as with CUDA."""
        self.points: list[str] = []
        """What the host has asked for."""
        self.breaks: Callable[[str], None] | None = None
        """Called with each of them before it is done."""

    @property
    def _all(self) -> tuple[SimulatedQueue, ...]:
        return self.up, self.compute, self.down

    @property
    def is_idle(self) -> bool:
        return not any(queue.pieces for queue in self._all)

    def meet(self, point: str) -> None:
        self.points.append(point)
        if self.breaks is not None:
            self.breaks(point)

    def on_host(self, nbytes: int) -> torch.Tensor:
        self.meet("on host")
        return self._block(nbytes)

    def on_device(self, nbytes: int) -> torch.Tensor:
        """As torch's allocator: memory that pending work of ``compute`` used, and still writes to."""
        with self.lock:
            self.meet("on device")
            block = self._block(nbytes)
            if self.compute.pieces:
                self.compute.pieces.append(lambda: block.fill_(0xEE))
        return block

    def finish_callers(self) -> None:
        self.meet("finish callers")

    def _block(self, nbytes: int) -> torch.Tensor:
        block = torch.full((nbytes,), self.random.choice(_GARBAGE), dtype=torch.uint8)
        self.blocks.append(block)
        return block

    def scribble(self) -> None:
        """Overwrite all memory; nothing may be under way."""
        with self.lock:
            self.finish()
            for block in self.blocks:
                block.fill_(self.random.choice(_GARBAGE))

    def finish(self) -> None:
        """Do all that was put in."""
        with self.lock:
            while not self.is_idle:
                self._step(self._any())

    def go_on(self) -> None:
        """The device does something, or not, while the host goes on."""
        if self.at_once:
            while (queue := self._any()) is not None:
                self._step(queue, raises=True)
        while self.random.random() < self.pace and (queue := self._any()) is not None:
            self._step(queue)

    def run_to(self, mark: SimulatedMark) -> None:
        with self.lock:
            self.meet(f"wait {mark.queue.name}")
            while not mark.is_reached:
                self._step(_needed(mark.queue) if self.is_lazy else self._any())
            self.go_on()
            if self.problem is not None:
                raise self.problem

    def _any(self) -> SimulatedQueue | None:
        ready = [queue for queue in self._all if queue.is_ready]
        return self.random.choice(ready) if ready else None

    def _step(self, queue: SimulatedQueue | None, *, raises: bool = False) -> None:
        assert queue is not None, "queues wait for each other"
        try:
            queue.step()
        except Exception as problem:
            queue.pieces.popleft()
            queue.done += 1
            if raises:
                raise
            self.problem = self.problem or problem


def _needed(queue: SimulatedQueue) -> SimulatedQueue:
    """The queue whose next piece comes before all else that this one waits for."""
    while isinstance(head := queue.pieces[0], SimulatedMark) and not head.is_reached:
        queue = head.queue
    return queue


@dataclass
class Step:
    function: Any
    args: Any
    kwargs: Any
    result: Any


class ReadBackError(RuntimeError):
    """What CUDA says to an operation that a captured stream does not permit."""


class Watch(TorchDispatchMode):
    """Refuses what no CUDA graph can hold: values that are read on the host, sizes that depend on values, tensors made of the
    host's data, copies between devices. Keeps every operation, to be done again."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").partition(".")[0]
        if func.namespace == "aten":
            with self:  # inference mode leaves operations whole that are made of others
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self._check(name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "lift_fresh" and result.dim():
            raise ReadBackError("a tensor made of the host's data")
        self.steps.append(Step(func, args, kwargs, result))
        return result

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        if name in _READ_BACK:
            raise ReadBackError(f"operation not permitted when stream is capturing: {name}")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise ReadBackError(f"operation not permitted when stream is capturing: {name} by a mask")
        devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.dim()}
        asked = kwargs.get("device")
        if len(devices) > 1 or (name == "_to_copy" and asked is not None and torch.device(asked) not in devices):
            raise ReadBackError(f"a copy between devices: {name}, {devices}, {asked}")


_READ_BACK = frozenset(
    "_local_scalar_dense nonzero masked_select equal bincount repeat_interleave _unique2 unique_dim unique_consecutive".split()
)
"""``repeat_interleave``: of a tensor of counts; one of a number is made of other operations."""


@dataclass(eq=False)
class Tape:
    """``Captured``: the operations of a function, with the host's values as they were when it was recorded."""

    recorder: TapeRecorder
    steps: Sequence[Step]
    result: torch.Tensor
    outputs: torch.Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        made: dict[int, torch.Tensor] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        with torch.inference_mode():
            for step in self.steps:
                result = step.function(*tree_map(now, step.args), **tree_map(now, step.kwargs))
                for before, after in zip(tree_leaves(step.result), tree_leaves(result), strict=True):
                    if isinstance(before, torch.Tensor):
                        made[id(before)] = after
            for other in self.recorder.tapes:
                other.outputs.fill_(torch.nan)
            self.outputs.copy_(now(self.result))


@dataclass
class TapeRecorder:
    """``Recorder``. ``breaks`` is called before each run, record and replay with its name and number."""

    queues: SimulatedQueues
    breaks: Callable[[str, int], None] = lambda _what, _number: None
    tapes: list[Tape] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._meet("run")
        with torch.inference_mode(), Watch():
            return function().clone()

    def record(self, function: Callable[[], torch.Tensor]) -> Tape:
        self._meet("record")
        with torch.inference_mode(), Watch() as watch:
            result = function()
        tape = Tape(self, watch.steps, result, torch.full_like(result, torch.nan))
        self.tapes.append(tape)
        return tape

    def replay(self, captured: Any) -> torch.Tensor:
        self._meet("replay")
        captured.replay()
        outputs: torch.Tensor = captured.outputs.clone()
        return outputs

    def memory_bytes(self) -> int:
        return 3 << 20

    def _meet(self, what: str) -> None:
        self.queues.finish()
        self.counts[what] = self.counts.get(what, -1) + 1
        self.breaks(what, self.counts[what])
