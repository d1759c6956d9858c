"""What a finished batch says to the broker: rows, and in few words why some inputs have none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from packhorse_shared.codec import MAX_HEADER_BYTES, Buffer
from packhorse_shared.messages import BatchFailed, Done, EncodeOptions, ErrorCode, InputFailure
from packhorse_worker.backend import EncodedBatch
from packhorse_worker.desk import Task

_MOST_MESSAGE_BYTES = 16 * 1024
"""Of the texts of one ``Done``; the failures behind are told by their code alone."""


def inputs_of(task: Task) -> tuple[list[NDArray[np.int32]], Sequence[EncodeOptions]]:
    """A batch's inputs: an int32 id array (a view of the payload) and the options of each."""
    lengths = task.work.lengths
    joined = np.frombuffer(task.payload, dtype="<i4")
    ends = list(itertools.accumulate(lengths))
    ids = [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return ids, task.work.options or [EncodeOptions()] * len(lengths)


def answer(task: Task, outcome: EncodedBatch, encode_ms: float) -> tuple[Done | BatchFailed, Buffer]:
    """The message and payload that end a batch.

    So many failures that they do not fit into a header (some 2,000 of a batch) fail the batch as a whole.
    """
    work = task.work
    done = Done(work.boot_id, work.batch_id, outcome.row_values, _bounded(outcome.failures), encode_ms)
    if len(outcome.failures) > 1000 and len(msgspec.msgpack.encode(done)) > MAX_HEADER_BYTES:
        message = f"{len(outcome.failures)} of {len(work.lengths)} inputs failed, the first one: {outcome.failures[0].message}"
        return BatchFailed(work.boot_id, work.batch_id, outcome.failures[0].code, message, retryable=False), b""
    return done, np.ascontiguousarray(outcome.values, dtype="<f4").data.cast("B")


def failed(task: Task, code: ErrorCode, message: str, *, retryable: bool) -> BatchFailed:
    """The message that a batch failed as a whole."""
    return BatchFailed(task.work.boot_id, task.work.batch_id, code, message, retryable=retryable)


def _bounded(failures: list[InputFailure]) -> list[InputFailure]:
    """The failures with texts as long as they fit together."""
    left = _MOST_MESSAGE_BYTES
    bounded = []
    for failure in failures:
        left -= len(failure.message.encode("utf-8", "replace"))
        bounded.append(failure if left >= 0 else msgspec.structs.replace(failure, message=""))
    return bounded
