"""Gives a loaded model its CUDA graphs, or says in one warning why it has none."""

from __future__ import annotations

import logging
import time

import torch

from packhorse_shared.graph_config import EncodeCudaGraphConfig
from packhorse_worker.engine.attention.ways import graphable_way
from packhorse_worker.engine.forward import PackedForward
from packhorse_worker.engine.graphs.buckets import Buckets
from packhorse_worker.engine.graphs.cuda import CudaRecorder
from packhorse_worker.engine.graphs.recording import CaptureError, GraphMaker
from packhorse_worker.engine.lanes.lane import QueuedLane
from packhorse_worker.engine.lanes.queues import CudaQueues
from packhorse_worker.engine.progress import progress_bar
from packhorse_worker.engine.runner import Runner

log = logging.getLogger(__name__)


def equip(runner: Runner, config: EncodeCudaGraphConfig, *, show_progress: bool | None) -> None:
    """Capture the graphs that a configuration asks for. ``show_progress``: a bar on stderr; None shows it on a terminal.

    Raises GraphConfigError as ``check_number``.
    """
    if why_none := _why_none(runner):
        log.warning("%s", why_none)
        return
    buckets = _buckets(runner, config)
    if buckets.why_none:
        log.warning("%s", buckets.why_none)
        return
    if buckets.lists.changes:
        log.info("sizes of CUDA graphs: %s", buckets.lists.changes)
    began = time.monotonic()
    try:
        with progress_bar("capturing CUDA graphs", len(buckets.shapes), show_progress) as progress:
            graphs = _maker(runner, config).make(buckets, progress)
    except CaptureError as problem:
        log.warning("cuda_graph_config: no graph is used, every batch runs eagerly: %s", problem)
        return
    assert isinstance(runner.lane, QueuedLane)
    runner.lane.use(graphs)
    log.info(
        "captured CUDA graphs",
        extra={
            "graphs": len(graphs),
            "memory_mib": round(graphs.memory_bytes / (1 << 20)),
            "seconds": round(time.monotonic() - began, 1),
        },
    )


def check_number(runner: Runner, config: EncodeCudaGraphConfig) -> None:
    """Raise GraphConfigError when a configuration asks for too many graphs, where a model can have any."""
    if not _why_none(runner):
        _buckets(runner, config)


def _buckets(runner: Runner, config: EncodeCudaGraphConfig) -> Buckets:
    limits = runner.limits
    longest = min(runner.facts.max_seq_len, limits.max_num_tokens)
    return Buckets.of(config, limits.max_batch_size, limits.max_num_tokens, longest)


def _why_none(runner: Runner) -> str:
    """Why this model cannot have graphs at all, or ""."""
    if not isinstance(runner.lane, QueuedLane):
        return "cuda_graph_config has no effect on a CPU: every batch runs eagerly, with the same vectors"
    if not runner.pipeline.is_packed:
        return "cuda_graph_config has no effect on this model, whose inputs cannot be packed: every batch runs eagerly"
    return ""


def _maker(runner: Runner, config: EncodeCudaGraphConfig) -> GraphMaker:
    assert isinstance(runner.lane, QueuedLane)
    queues, packed = runner.lane.queues, runner.pipeline.transform
    assert isinstance(queues, CudaQueues)
    assert isinstance(packed, PackedForward)
    return GraphMaker(
        runner.pipeline.with_forward(packed.attending(graphable_way([packed.way]))),
        config.extra_model_inputs,
        CudaRecorder(queues.compute, runner.pipeline.device),
        queues,
        vocabulary_rows=runner.facts.vocabulary_rows,
        dtype=getattr(torch, runner.facts.dtype),
    )
