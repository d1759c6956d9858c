"""What the loop asks of a model: the seam between sockets and torch.

The loop knows this protocol only, so it runs (and is tested) without torch; the engine's ``Encoder`` fulfils it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from packhorse_shared.errors import PackhorseError
from packhorse_shared.messages import EncodeOptions, InputFailure, ModelFacts, WorkerLimits


class DeviceLostError(PackhorseError, RuntimeError):
    """The device is in a state that only a new process leaves: a sticky CUDA error. The worker exits non-zero."""


@dataclass(frozen=True)
class EncodedBatch:
    """What became of a batch: the rows of its inputs, and why some have none."""

    values: NDArray[np.float32]
    """The rows of all inputs, in batch order, joined."""
    row_values: list[int]
    """Number of values of each input's row; 0 for an input that failed."""
    failures: list[InputFailure]


class Backend(Protocol):
    """A loaded and warmed-up model on one device."""

    facts: ModelFacts
    limits: WorkerLimits

    overlaps: bool
    """Whether the device runs beside the host: then the next batch is started before the one before it is finished."""

    def start_batch(self, words: Sequence[NDArray[np.int32]], options: Sequence[EncodeOptions]) -> Callable[[], EncodedBatch]:
        """Start to encode a batch: one int32 array of words (see ``messages.py``) and one ``EncodeOptions`` per input.

        Where batches overlap this returns when the device was told what to do. What is returned waits for the results, in any
        thread, without holding the interpreter's lock, and is called once, in the order in which the batches were started; the
        arrays of the result are written to no more. ``words`` live until then.

        An input that fails is in ``failures`` and harms no other. Both raise DeviceLostError when the process must end.
        """

    def memory_bytes(self) -> int | None:
        """Device memory that this process holds, or None where that is the process's resident memory."""
