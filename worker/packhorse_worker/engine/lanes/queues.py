"""What a lane needs of a device: queues of work that run beside the host and beside each other, and marks to wait for.

``CudaQueues`` are CUDA streams and events. Tests have others, which do the work late and in any order that the marks allow: a
wait that is missing shows there, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a queue: reached when all work before it is done."""

    def wait(self) -> None:
        """Block this thread until it is reached. Raises what the device raised on the way."""


class Queue(Protocol):
    """Work that runs in order, one piece after the other."""

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor to one of the same size and format, one of them on the device."""

    def run(self, work: Callable[[], object]) -> None:
        """Run work that puts kernels into this queue. Raises what it raises."""

    def mark(self) -> Mark:
        """The point that is reached when all work put in so far is done."""

    def after(self, mark: Mark) -> None:
        """Let what is put in from now on begin only once a mark of another queue is reached. Does not block."""


class Queues(Protocol):
    """The queues of a device."""

    @property
    def up(self) -> Queue:
        """Host to device."""

    @property
    def compute(self) -> Queue:
        """The forwards."""

    @property
    def down(self) -> Queue:
        """Device to host."""

    def on_host(self, nbytes: int) -> torch.Tensor:
        """A block of uint8 on the host that the device can copy from and to by itself."""

    def on_device(self, nbytes: int) -> torch.Tensor:
        """A block of uint8 on the device, in memory that work in ``compute`` may have had before: other queues wait for what is
        in there now before they use it."""

    def finish_callers(self) -> None:
        """Block until the device has done what the calling code has asked it for: tensors it hands over are ready then."""


class CudaMark:
    """A CUDA event. The thread that waits for it sleeps: a worker for each GPU that spins would take a core each."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """See ``Mark``."""
        self.event.synchronize()


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no types here

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """See ``Queue``."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            into.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        """See ``Queue``."""
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> CudaMark:
        """See ``Queue``."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # as above
        event.record(self.stream)
        return CudaMark(event)

    def after(self, mark: Mark) -> None:
        """See ``Queue``."""
        assert isinstance(mark, CudaMark), mark
        self.stream.wait_event(mark.event)


class CudaQueues:
    """The streams of one worker. None of them is CUDA's default stream: work there would hold up all others, and graphs cannot
    be captured there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.synchronize(device)  # the model was put there by the default stream
        self.up, self.compute, self.down = (CudaQueue(device) for _ in range(3))

    def on_host(self, nbytes: int) -> torch.Tensor:
        """See ``Queues``."""
        with torch.cuda.device(self._device):  # torch pins in the current device's context, and would make one for that
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def on_device(self, nbytes: int) -> torch.Tensor:
        """See ``Queues``."""
        with torch.cuda.stream(self.compute.stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def finish_callers(self) -> None:
        """See ``Queues``."""
        # An event, because a stream is not waited for while another encoder of the process makes its graphs.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch has no types here
        event.record(torch.cuda.current_stream(self._device))
        event.synchronize()
