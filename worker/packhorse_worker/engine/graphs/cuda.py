"""CUDA graphs as torch has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from packhorse_worker.engine.graphs.graphs import Captured
from packhorse_worker.engine.lanes.queues import CudaQueue


@dataclass(frozen=True, eq=False)
class CudaCaptured:
    """A CUDA graph, and the tensor that it writes."""

    outputs: torch.Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        """See ``Captured``. One launch into the current stream."""
        self.graph.replay()


class CudaRecorder:
    """Captures in the stream that computes. All graphs compute in one pool of memory: they never run at the same time."""

    def __init__(self, queue: CudaQueue, device: torch.device) -> None:
        self._stream = queue.stream
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved(device)
        # A pool that no graph holds any more cannot be used again, and the first capture may find no memory: an empty graph
        # holds it meanwhile.
        self._holder = self._empty_graph()

    def run(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See ``Recorder``. What only the first run does (kernels loaded, workspaces made) is done then."""
        with torch.cuda.stream(self._stream), _waits_refused():
            outputs = function().clone()
        self._stream.synchronize()
        return outputs

    def record(self, function: Callable[[], torch.Tensor]) -> CudaCaptured:
        """See ``Recorder``. Threads that are not ours may go on with theirs meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # After a capture that CUDA refused, torch leaves the stream current: so this puts back the one before.
        with torch.cuda.stream(self._stream):
            try:
                with self._capturing(graph):
                    outputs = function()
            except BaseException:
                self._tidy_up()
                raise
        return CudaCaptured(outputs, graph)

    def replay(self, captured: Captured) -> torch.Tensor:
        """See ``Recorder``."""
        with torch.cuda.stream(self._stream):
            captured.replay()
            outputs = captured.outputs.clone()
        self._stream.synchronize()
        return outputs

    def _tidy_up(self) -> None:
        """After a capture that CUDA refused, some versions of torch take it for still under way: the allocator can then give no
        memory back, and there are no random numbers until a capture has gone well. The allocator of pinned memory takes the
        pool for under way too, cannot be told otherwise, and refuses it from then on: what comes later gets another one.
        https://github.com/pytorch/pytorch/pull/180395"""
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._pool = torch.cuda.graph_pool_handle()
        except (RuntimeError, AttributeError):  # it is known to be over, or this torch has no such function
            pass
        with suppress(RuntimeError):  # what was raised first is what counts
            self._holder = self._empty_graph()

    def _empty_graph(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
            # What torch makes for the first graph of a process it also writes to at later ones, whatever mode they are made in.
            with torch.inference_mode(mode=False), self._capturing(graph):
                pass
        return graph

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def memory_bytes(self) -> int:
        """See ``Recorder``."""
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved(self._device)) - self._before


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Within this context torch raises RuntimeError where it would wait for the device: in every thread of the process."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch says once that it may overlook some of them. What it overlooks here, the capture refuses.
        warnings.filterwarnings("ignore", message="Synchronization debug mode", category=UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
